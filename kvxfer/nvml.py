"""GPUs as their driver tells through NVML: link, throughput, BAR1, memory, NUMA node; in the doctor and as metrics.

NVML is asked in another process, for a call into a driver that is wedged does not come back: once with a time limit
(`ask_gpus`), or again and again (`GpuMonitor`) by one child, whose last answer is what a caller gets, with its age.
What is missing, a field included, has its reason; nothing here raises.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvxfer import probe
from kvxfer.errors import ConfigError
from kvxfer.metrics import Kind, Series, Value, expose
from kvxfer.topology import SYSFS, Link, link_of, numa_node, pci_device

__all__ = ["Gpu", "GpuMonitor", "Gpus", "ask_gpus", "gpu_series"]

INTERVAL_S = 10.0
_STALE_INTERVALS = 3  # beyond this a figure is none of now
_RETRY_S = 60.0  # until a child that ended is followed by another
_GRACE_S = 1.0
_MARK = "kvxfer-nvml:"  # what a library prints beside it is not the answer

# Runs in the child. Every field by itself: a card that does not support one still tells the others.
_SAMPLE = """
import pynvml
def text(value): return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
def sample():
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        found, missing = {}, {}
        def ask(fields, name, *arguments):
            try:
                said = getattr(pynvml, name)(*arguments)
                found.update({field: read(said) for field, read in fields.items()})
            except Exception as exc:
                why = f"{name}: {exc}" if isinstance(exc, pynvml.NVMLError) else f"{name}: {type(exc).__name__}: {exc}"
                missing.update(dict.fromkeys(fields, why))
        gpus.append({"index": index, "found": found, "missing": missing})
        handles = []
        ask({"handle": handles.append}, "nvmlDeviceGetHandleByIndex", index)
        if not handles: continue
        del found["handle"]
        handle = handles[0]
        ask({"name": text}, "nvmlDeviceGetName", handle)
        ask({"uuid": text}, "nvmlDeviceGetUUID", handle)
        ask({"bus": lambda pci: text(pci.busId)}, "nvmlDeviceGetPciInfo", handle)
        ask({"memory_total": lambda of: int(of.total), "memory_free": lambda of: int(of.free)},
            "nvmlDeviceGetMemoryInfo", handle)
        ask({"bar1_total": lambda of: int(of.bar1Total), "bar1_used": lambda of: int(of.bar1Used),
             "bar1_free": lambda of: int(of.bar1Free)}, "nvmlDeviceGetBAR1MemoryInfo", handle)
        ask({"generation": int}, "nvmlDeviceGetCurrPcieLinkGeneration", handle)
        ask({"width": int}, "nvmlDeviceGetCurrPcieLinkWidth", handle)
        ask({"max_generation": int}, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
        ask({"max_width": int}, "nvmlDeviceGetMaxPcieLinkWidth", handle)
        ask({"card_generation": int}, "nvmlDeviceGetGpuMaxPcieLinkGeneration", handle)
        kib = lambda value: int(value) * 1024
        ask({"rx": kib}, "nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_RX_BYTES)
        ask({"tx": kib}, "nvmlDeviceGetPcieThroughput", handle, pynvml.NVML_PCIE_UTIL_TX_BYTES)
    return {"driver": text(pynvml.nvmlSystemGetDriverVersion()), "gpus": gpus}
pynvml.nvmlInit()
"""

# The child ends when its standard input does: with whoever started it, however that ended.
_LOOP = """
import json, select, sys
def say(said): print({mark!r} + json.dumps(said), flush=True)
try:
    exec({sample!r})
    while True:
        say(sample())
        if select.select([sys.stdin], [], [], {interval!r})[0]: break
except Exception as exc:
    say({{"error": f"{{type(exc).__name__}}: {{exc}}"}})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. Sizes in bytes; None: not known, and `missing` has the reason under the field's name."""

    index: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None  # of PCI, "00000000:3B:00.0"
    numa_node: int | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    bar1_total: int | None = None
    bar1_used: int | None = None
    bar1_free: int | None = None
    link: Link | None = None  # as it is now
    link_max: Link | None = None  # of card, slot and system together
    link_card: Link | None = None  # of the card alone
    rx: int | None = None  # bytes a second over the link into the GPU, over the last 20 ms
    tx: int | None = None  # and out of it
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def link_why(self) -> str:
        """Why the link is less than what the card can do; empty where it is not, or nobody knows."""
        now, card = self.link, self.link_card or self.link_max
        if now is None or card is None:
            return ""
        whys = []
        if now.width < card.width:
            whys.append(f"{now.width} lanes of the card's {card.width}: the slot, a riser or a switch has no more")
        if self.link_max is not None and self.link_max.generation < card.generation:
            whys.append(f"the system allows generation {self.link_max.generation} of the card's {card.generation}")
        if now.generation < (self.link_max or card).generation:
            whys.append(f"generation {now.generation} now: an idle card lowers it, look again under load")
        return "; ".join(whys)


@dataclass(frozen=True, slots=True)
class Gpus:
    """What NVML answered."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    why: str = ""  # why there is no answer
    age_s: float = 0.0  # of the answer


def ask_gpus(timeout_s: float = probe.TIMEOUT_S, sysfs: Path = SYSFS) -> Gpus:
    """Asks once; waits `timeout_s` seconds at most, and about a second to end the child."""
    if why := _absent():
        return Gpus(why=why)
    answer = probe.ask(_SAMPLE + "answer(sample())", timeout_s)
    return Gpus(why=answer.why) if answer.said is None else _gpus(answer.said, sysfs)


def _absent() -> str:
    try:
        there = find_spec("pynvml") is not None
    except (ImportError, ValueError):
        there = False
    return "" if there else "nvidia-ml-py is not installed"


def _gpus(said: Mapping[str, Any], sysfs: Path) -> Gpus:
    return Gpus(tuple(_gpu(each, sysfs) for each in said["gpus"]), said["driver"])


def _gpu(said: Mapping[str, Any], sysfs: Path) -> Gpu:
    found, missing = dict(said["found"]), dict(said["missing"])

    def link(name: str, generation: str, width: str) -> Link | None:
        if generation in found and width in found:
            return Link(found[generation], found[width])
        missing[name] = next((missing[part] for part in (generation, width) if part in missing), "not asked")
        return None

    place = pci_device(found["bus"], sysfs) if "bus" in found else None
    node = None if place is None else numa_node(place)
    if node is None:
        missing["numa_node"] = missing.get("bus", "the system names none")
    widest = None if place is None else link_of(place, "max")
    if widest is not None:  # NVML's own figure is the lesser of card and slot
        found["card_width"] = widest.width
        found.setdefault("card_generation", widest.generation)
    links: dict[str, Any] = {
        "link": link("link", "generation", "width"),
        "link_max": link("link_max", "max_generation", "max_width"),
        "link_card": link("link_card", "card_generation", "card_width" if "card_width" in found else "max_width"),
    }
    parts = ("generation", "width", "max_generation", "max_width", "card_generation", "card_width")
    plain = {name: value for name, value in found.items() if name not in parts}
    reasons = {name: why for name, why in missing.items() if name not in parts}
    return Gpu(index=said["index"], numa_node=node, missing=reasons, **plain, **links)


# ---- as metrics ----------------------------------------------------------------------------------------


def _generation(link: Link | None) -> int | None:
    return None if link is None else link.generation


def _lanes(link: Link | None) -> int | None:
    return None if link is None else link.width


_FIGURES: Mapping[str, tuple[str, str, Callable[[Gpu], float | None]]] = {
    "kvxfer_gpu_memory_total_bytes": ("Memory of the GPU.", "bytes", lambda gpu: gpu.memory_total),
    "kvxfer_gpu_memory_free_bytes": ("Of it, what nobody has taken.", "bytes", lambda gpu: gpu.memory_free),
    "kvxfer_gpu_bar1_total_bytes": ("The window through which drives reach its memory.", "bytes",
                                    lambda gpu: gpu.bar1_total),
    "kvxfer_gpu_bar1_free_bytes": ("Of it, what is not mapped.", "bytes", lambda gpu: gpu.bar1_free),
    "kvxfer_gpu_pcie_rx_bytes_per_s": ("Over PCIe into the GPU, over the last 20 ms.", "", lambda gpu: gpu.rx),
    "kvxfer_gpu_pcie_tx_bytes_per_s": ("Over PCIe out of the GPU, over the last 20 ms.", "", lambda gpu: gpu.tx),
    "kvxfer_gpu_pcie_generation": ("Of the link now; an idle GPU lowers it.", "",
                                   lambda gpu: _generation(gpu.link)),
    "kvxfer_gpu_pcie_lanes": ("Of the link now.", "lanes", lambda gpu: _lanes(gpu.link)),
    "kvxfer_gpu_pcie_card_lanes": ("What the card could use.", "lanes",
                                   lambda gpu: _lanes(gpu.link_card)),
    "kvxfer_gpu_numa_node": ("Where the GPU hangs.", "", lambda gpu: gpu.numa_node),
}  # fmt: skip


def gpu_series(seen: Gpus) -> tuple[tuple[Series, ...], dict[tuple[str, tuple[str, ...]], Value]]:
    """The table of what is known, and its values: a figure that nobody knows is named, and has no sample.

    `kvxfer_gpus` is always there, and 0 where NVML does not answer.
    """
    table = [Series("kvxfer_gpus", Kind.GAUGE, "GPUs that NVML tells of; 0 where it does not answer.", "gpus")]
    values: dict[tuple[str, tuple[str, ...]], Value] = {("kvxfer_gpus", ()): len(seen.gpus)}
    for name, (help_text, unit, read) in _FIGURES.items():
        known = {str(gpu.index): value for gpu in seen.gpus if (value := read(gpu)) is not None}
        table.append(Series(name, Kind.GAUGE, help_text, unit, (("gpu", tuple(known)),)))
        values |= {(name, (index,)): value for index, value in known.items()}
    return tuple(table), values


class GpuMonitor:
    """Samples the GPUs in a process of its own, for metrics: asking it never waits for the driver. Thread-safe.

    Where NVML stops answering, the last sample is told for three intervals, and then none.
    """

    def __init__(self, interval_s: float = INTERVAL_S, sysfs: Path = SYSFS, retry_s: float = _RETRY_S) -> None:
        """Raises ConfigError for an interval that cannot work.

        Args:
            interval_s: between two samples; each takes some 40 ms a GPU in the child.
            sysfs: for tests.
            retry_s: until a child that ended is followed by another.
        """
        if not 0.05 <= interval_s <= 3600:
            raise ConfigError(f"interval_s={interval_s:g} must be 0.05 to 3600")
        self._interval_s, self._sysfs, self._retry_s = interval_s, sysfs, retry_s
        self._lock = threading.Lock()
        self._last: Gpus | None = None
        self._since = 0.0
        self._why = _absent() or "no answer yet"
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if not _absent():
            self._thread = threading.Thread(target=self._run, name="kvx-nvml", daemon=True)
            self._thread.start()

    def sample(self) -> Gpus:
        """The last answer that is not too old. Returns at once."""
        with self._lock:
            age = time.monotonic() - self._since
            if self._last is None:
                return Gpus(why=self._why)
            if age > _STALE_INTERVALS * self._interval_s:
                return Gpus(why=f"no answer since {age:.0f} s", age_s=age)
            return Gpus(self._last.gpus, self._last.driver, "", age)

    def render(self) -> str:
        """`sample` in the text format of Prometheus. Returns at once."""
        return expose(*gpu_series(self.sample()))

    def close(self) -> None:
        """Ends the child; one that is inside the driver is left behind. Twice is fine."""
        self._closed.set()
        with self._lock:
            child = self._child
        if child is not None:
            _end(child)
        if self._thread is not None:
            self._thread.join(_GRACE_S)

    def __enter__(self) -> GpuMonitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            why = self._watch()
            with self._lock:
                self._why = why
            self._closed.wait(self._retry_s)

    def _watch(self) -> str:
        """Takes in what one child says, until it ends; why it did."""
        code = _LOOP.format(mark=_MARK, sample=_SAMPLE, interval=self._interval_s)
        with self._lock:
            if self._closed.is_set():
                return "closed"
            try:
                child = self._child = subprocess.Popen(
                    [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                )  # fmt: skip
            except OSError as exc:
                return f"no process could be started: {exc}"
        assert child.stdout is not None
        why = "it ended the process that asked"
        with child.stdout as lines:
            for line in lines:
                if not (line.startswith(_MARK.encode()) and line.endswith(b"\n")):  # or cut off by a kill
                    continue
                said = json.loads(line.removeprefix(_MARK.encode()))
                if "error" in said:
                    why = said["error"]
                    continue
                seen = _gpus(said, self._sysfs)
                with self._lock:
                    self._last, self._since = seen, time.monotonic()
        _end(child)
        return why


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if child.stdin is not None:
            child.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
        return
    with suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        child.wait(_GRACE_S)
