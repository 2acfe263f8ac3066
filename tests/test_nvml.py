"""GPUs through NVML: every field that is told or missing, its reason, and that no driver can hold up who asks."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer import ConfigError, nvml
from kvxfer.nvml import Gpu, GpuMonitor, Gpus, ask_gpus, gpu_series
from kvxfer.topology import Link
from tests import nvml_double
from tests.doubles import Doubles
from tests.test_metrics import parse

BUS = "bus/pci/devices/0000:3b:00.0"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts the double in the way of children; what it answers is said with a call."""
    Doubles(tmp_path, monkeypatch).module("pynvml", Path(nvml_double.__file__).read_text())

    def tell(**what: Any) -> None:
        monkeypatch.setenv("FAKE_NVML", json.dumps(what))

    return tell


def card(tmp_path: Path, **files: str) -> Path:
    """A sysfs with the double's GPU."""
    place = tmp_path / "sys" / BUS
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text + "\n")
    return tmp_path / "sys"


def eventually(what: Callable[[], Any], patience_s: float = 30.0) -> Any:
    end = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return found


def test_the_double_has_the_signatures_of_the_installed_pynvml() -> None:
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    import pynvml

    names = [name for name in dir(nvml_double) if name.startswith("nvml")]
    assert len(names) > 10
    for name in names:
        real, double = inspect.signature(getattr(pynvml, name)), inspect.signature(getattr(nvml_double, name))
        assert str(real) == str(double), name
    for name in ("NVML_PCIE_UTIL_TX_BYTES", "NVML_PCIE_UTIL_RX_BYTES"):
        assert getattr(pynvml, name) == getattr(nvml_double, name)
    assert issubclass(pynvml.NVMLError_NotSupported, pynvml.NVMLError)
    asked = set(nvml._SAMPLE.replace('"', " ").replace("(", " ").replace(".", " ").split())
    assert {word for word in asked if word.startswith("nvml")} == set(names)
    for struct, fields in (
        (pynvml.c_nvmlMemory_t, ("total", "free")),
        (pynvml.c_nvmlBAR1Memory_t, ("bar1Total", "bar1Used", "bar1Free")),
        (pynvml.nvmlPciInfo_t, ("busId",)),
    ):
        assert set(fields) <= {field[0] for field in struct._fields_}


def test_all_that_a_gpu_tells(tmp_path: Path, told: Callable[..., None]) -> None:
    sysfs = card(tmp_path, numa_node="1", max_link_speed="32.0 GT/s PCIe", max_link_width="16")
    seen = ask_gpus(sysfs=sysfs)
    assert (seen.why, seen.driver, seen.age_s) == ("", "580.1", 0.0)
    assert seen.gpus == (
        Gpu(
            index=0, name="Fake H200", uuid="GPU-1", bus="00000000:3B:00.0", numa_node=1, memory_total=141 << 30,
            memory_free=100 << 30, bar1_total=256 << 30, bar1_used=1 << 30, bar1_free=255 << 30, link=Link(5, 16),
            link_max=Link(5, 16), link_card=Link(5, 16), rx=9 * 1024, tx=7 * 1024,
        ),
    )  # fmt: skip
    assert seen.gpus[0].link_why == ""


@pytest.mark.parametrize(
    ("answers", "files", "whys"),
    [
        ({"CurrPcieLinkGeneration": 1}, {}, ["generation 1 now: an idle card lowers it"]),
        (
            {"CurrPcieLinkWidth": 8, "MaxPcieLinkWidth": 8},
            {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"},
            ["8 lanes of the card's 16"],
        ),
        ({"CurrPcieLinkWidth": 4}, {}, ["4 lanes of the card's 16"]),
        (
            {"CurrPcieLinkGeneration": 4, "MaxPcieLinkGeneration": 4},
            {},
            ["the system allows generation 4 of the card's 5"],
        ),
        ({"CurrPcieLinkGeneration": "!Not Supported"}, {}, []),
    ],
)
def test_a_link_that_is_less_than_the_cards_has_its_reason(
    tmp_path: Path, told: Callable[..., None], answers: dict[str, Any], files: dict[str, str], whys: list[str]
) -> None:
    told(gpus=[answers])
    (gpu,) = ask_gpus(sysfs=card(tmp_path, **files)).gpus
    assert [why for why in whys if why not in gpu.link_why] == []
    assert gpu.link_why.count(";") == max(0, len(whys) - 1)
    assert bool(gpu.link_why) == bool(whys)


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        ("Name", ["name"]),
        ("UUID", ["uuid"]),
        ("PciInfo", ["bus", "numa_node"]),
        ("MemoryInfo", ["memory_total", "memory_free"]),
        ("BAR1MemoryInfo", ["bar1_total", "bar1_used", "bar1_free"]),
        ("CurrPcieLinkWidth", ["link"]),
        ("MaxPcieLinkGeneration", ["link_max"]),
        ("GpuMaxPcieLinkGeneration", ["link_card"]),
        ("PcieThroughput", ["rx", "tx"]),
    ],
)
def test_a_field_that_is_not_told_has_its_reason_and_costs_no_other(
    tmp_path: Path, told: Callable[..., None], function: str, fields: list[str]
) -> None:
    told(gpus=[{function: "!Not Supported"}, {}])
    poor, rich = ask_gpus(sysfs=card(tmp_path, numa_node="0")).gpus
    assert dict(rich.missing) == {}
    assert sorted(poor.missing) == sorted(fields)
    for name in Gpu.__slots__:
        if name not in ("index", "missing"):
            assert (getattr(poor, name) is None) == (name in fields), name
    assert all("Not Supported" in why for why in poor.missing.values())


def test_a_gpu_that_may_not_be_opened_is_told_of(told: Callable[..., None]) -> None:
    told(gpus=[{}, {"HandleByIndex": "!Insufficient Permissions"}])
    seen = ask_gpus()
    assert [gpu.index for gpu in seen.gpus] == [0, 1]
    assert "Insufficient Permissions" in seen.gpus[1].missing["handle"]
    assert "Insufficient Permissions" not in str(seen.gpus[0])
    assert seen.gpus[1].name is None


def test_a_node_that_the_system_does_not_name(tmp_path: Path, told: Callable[..., None]) -> None:
    (gpu,) = ask_gpus(sysfs=card(tmp_path, numa_node="-1")).gpus
    assert (gpu.numa_node, gpu.missing) == (None, {"numa_node": "the system names none"})


def test_without_pynvml_or_a_driver_there_is_a_reason(
    tmp_path: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(init="!Driver Not Loaded")
    assert ask_gpus() == Gpus(why="NVMLError_NotSupported: Driver Not Loaded")
    monkeypatch.setattr(nvml, "find_spec", lambda _: None)
    assert ask_gpus() == Gpus(why="nvidia-ml-py is not installed")
    with GpuMonitor() as monitor:
        assert monitor.sample() == Gpus(why="nvidia-ml-py is not installed")
        assert parse(monitor.render()) == {("kvxfer_gpus", ()): 0.0}


@pytest.mark.parametrize("where", [{"init": "hang"}, {"gpus": [{"BAR1MemoryInfo": "hang"}]}])
def test_a_driver_that_is_wedged_is_given_up(told: Callable[..., None], where: dict[str, Any]) -> None:
    told(**where)
    start = time.monotonic()
    assert ask_gpus(timeout_s=0.5).why == "no answer within 0.5 s"
    assert time.monotonic() - start < 20


def test_metrics_of_what_is_known_and_nothing_else(told: Callable[..., None], tmp_path: Path) -> None:
    told(gpus=[{}, {"PcieThroughput": "!Not Supported", "BAR1MemoryInfo": [8, 2, 6]}])
    with GpuMonitor(0.1, card(tmp_path, numa_node="0")) as monitor:
        # In one look: on a busy machine the next may find the figures too old.
        samples = eventually(lambda: found if (found := parse(monitor.render()))["kvxfer_gpus", ()] else None)
    assert samples["kvxfer_gpus", ()] == 2
    assert samples["kvxfer_gpu_bar1_free_bytes", (("gpu", "1"),)] == 6
    assert samples["kvxfer_gpu_pcie_rx_bytes_per_s", (("gpu", "0"),)] == 9 * 1024
    assert samples["kvxfer_gpu_pcie_tx_bytes_per_s", (("gpu", "0"),)] == 7 * 1024
    assert samples["kvxfer_gpu_pcie_generation", (("gpu", "0"),)] == 5
    assert samples["kvxfer_gpu_pcie_lanes", (("gpu", "1"),)] == 16
    assert samples["kvxfer_gpu_numa_node", (("gpu", "1"),)] == 0
    assert ("kvxfer_gpu_pcie_rx_bytes_per_s", (("gpu", "1"),)) not in samples
    names = {series.name for series in gpu_series(Gpus())[0]}
    assert {name for name, _ in samples} == names


def test_a_monitor_of_a_wedged_driver_answers_at_once_and_then_not_with_old_figures(
    told: Callable[..., None],
) -> None:
    told(wedge=12)  # for a second its answers are to be seen
    monitor = GpuMonitor(0.1)
    eventually(lambda: monitor.sample().gpus)
    seen = eventually(lambda: found if "no answer since" in (found := monitor.sample()).why else None)
    assert seen.gpus == ()
    assert seen.age_s > 0.2
    start = time.monotonic()
    monitor.sample()
    monitor.render()
    assert time.monotonic() - start < 10
    child = monitor._child
    monitor.close()
    monitor.close()
    assert child is not None and child.poll() is not None


def test_a_child_that_ends_is_followed_by_another(told: Callable[..., None]) -> None:
    told(exit=2)
    with GpuMonitor(0.05, retry_s=0.1) as monitor:
        eventually(lambda: monitor.sample().gpus)
        first = monitor._child
        eventually(lambda: monitor._child is not first and monitor.sample().gpus)


def test_what_ended_the_child_is_told(told: Callable[..., None]) -> None:
    told(init="!Driver Not Loaded")
    with GpuMonitor(0.05) as monitor:
        assert eventually(lambda: "Driver Not Loaded" in monitor.sample().why)


def test_the_child_goes_with_its_parent_however_that_ends(told: Callable[..., None]) -> None:
    told()
    script = (
        "import time\nfrom kvxfer.nvml import GpuMonitor\nmonitor = GpuMonitor(0.1)\n"
        "while not monitor.sample().gpus: time.sleep(0.01)\n"
        "print(monitor._child.pid, flush=True)\ntime.sleep(1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    eventually(lambda: not alive(child))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_does_not_close_it_ends(told: Callable[..., None]) -> None:
    told(init="hang")
    script = "from kvxfer.nvml import GpuMonitor\nmonitor = GpuMonitor(0.1)\nprint(monitor.sample().why)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no answer yet\n", "")


@pytest.mark.parametrize("interval", [0, -1, float("nan"), 1e9])
def test_an_interval_that_cannot_work_is_named(interval: float) -> None:
    with pytest.raises(ConfigError, match="interval_s"):
        GpuMonitor(interval)
