"""What the doctor finds out: the machine (kvxfer.probe), directories, and what a configuration takes."""

from __future__ import annotations

import os
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvxfer import probe
from kvxfer.cli.doctor_calibration import calibration
from kvxfer.cli.output import as_object
from kvxfer.config import EngineConfig, StoreConfig, staging_buffer, staging_plan
from kvxfer.drive_wear import Wear, ask_wear, drives_under
from kvxfer.drive_writes import DriveWatch, DriveWrites
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.geometry import PRESETS
from kvxfer.io.modes import NETWORK_FILESYSTEMS, PROBE_TIMEOUT_S, filesystem_type, probe_mode
from kvxfer.io.uring import try_uring
from kvxfer.layout import kvx1_slot, row_mapping
from kvxfer.nvml import Gpus, ask_gpus
from kvxfer.slot import MAX_BLOCKS, SlotLayout
from kvxfer.store.root import ROOT_FILE, read_root
from kvxfer.topology import Drive, drive_of

MAX_CHUNK_BYTES = 16 << 30
MAX_TIMEOUT_S = 3600.0
_LADDER_STEPS = 8  # questions and tests that may each take their time
_DIRECTORY_TIMEOUT_S = 2 * PROBE_TIMEOUT_S + 5  # a try with direct I/O, one without, and what is beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to look at, checked.

    Raises:
        ConfigError: a value that cannot work; names the option, or the field, and what is allowed.
    """

    directories: tuple[Path, ...]
    io_threads: int
    chunk_bytes: int | None
    preset: str | None
    blocks_per_chunk: int
    capacity_bytes: int | None
    timeout_s: float = probe.TIMEOUT_S  # of each question that may get no answer
    calibrate: bool = False  # which copy engine suits the device: then there must be one

    def __post_init__(self) -> None:
        if self.preset is not None and self.chunk_bytes is not None:
            raise ConfigError("--preset and --chunk-bytes: one of them says how large a chunk is")
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"--preset {self.preset!r}: allowed are {', '.join(PRESETS)}")
        if self.chunk_bytes is not None and not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(f"--chunk-bytes {self.chunk_bytes}: allowed are 1 to {MAX_CHUNK_BYTES}")
        if not 1 <= self.blocks_per_chunk <= MAX_BLOCKS:
            raise ConfigError(f"--blocks-per-chunk {self.blocks_per_chunk}: allowed are 1 to {MAX_BLOCKS}")
        if not 0.1 <= self.timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"--timeout {self.timeout_s:g}: allowed are 0.1 to {MAX_TIMEOUT_S:g}")
        self.memory()

    def slot(self) -> SlotLayout | None:
        """Of a chunk, at the least alignment; None where no chunk was described."""
        if self.preset is not None:
            return kvx1_slot(PRESETS[self.preset], blocks_per_chunk=self.blocks_per_chunk)
        return None if self.chunk_bytes is None else row_mapping(self.chunk_bytes).slot

    def memory(self) -> Memory:
        """What the configuration takes, by its own rules."""
        store = StoreConfig(root=self.directories[0])
        if self.capacity_bytes is not None:
            store = StoreConfig(root=self.directories[0], capacity_bytes=self.capacity_bytes)
        engine, slot = EngineConfig(io_threads=self.io_threads), self.slot()
        threads, whole = (engine.io_threads, None) if slot is None else staging_plan(engine, slot)
        return Memory(
            io_threads=threads,
            slot_bytes=None if slot is None else slot.slot_bytes,
            staging_bytes_per_thread=None if slot is None else staging_buffer(slot),
            staging_bytes=whole,
            capacity_bytes=store.capacity_bytes,
            slab_bytes=store.effective_slab_bytes,
            index_map_bytes=store.effective_index_map_bytes,
            descriptors=store.descriptors,
            descriptors_allowed=probe.limits()["open_files"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a store and an engine will take. Sizes in bytes."""

    io_threads: int
    slot_bytes: int | None
    staging_bytes_per_thread: int | None  # at most, once a thread has moved a whole chunk
    staging_bytes: int | None  # of all threads, those included that may replace lost ones
    capacity_bytes: int
    slab_bytes: int
    index_map_bytes: int  # largest size of the index file, which is mapped
    descriptors: int
    descriptors_allowed: int | None  # None: no limit

    @property
    def problem(self) -> str:
        """Why it cannot work here."""
        if self.descriptors_allowed is None or self.descriptors <= self.descriptors_allowed:
            return ""
        return (
            f"{self.descriptors} open files are needed, this process may have {self.descriptors_allowed}: raise "
            "slab_bytes, or the limit (ulimit -n)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """One directory. Sizes in bytes."""

    path: str
    tried: str = ""  # where: the nearest directory that exists
    filesystem: str = "unknown"
    network: bool = False
    io_mode: str | None = None
    why: str = ""  # what was found, and the reason of each step down
    uring: bool | None = None  # whether io="uring" would work, and why not, or what is missing of it; None: not tried
    uring_why: str = ""
    alignment: int | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None  # None: as many as there is room for
    rung: dict[str, Any] | None = None  # ladder.Rung.as_json(): how a device's memory gets there; None: not tried
    root: dict[str, int] | None = None  # format, alignment and weight_epoch, if it is a root
    drive: Drive | None = None  # None: not looked for
    writes: DriveWrites | None = None  # size of that drive, and what the kernel has written to it; None: as `drive`
    wear: Wear | None = None  # what that drive says itself
    problem: str = ""  # why a store cannot use it

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self) | {"wear": None if self.wear is None else self.wear.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was found."""

    versions: dict[str, str | None]
    machine: probe.Machine
    limits: dict[str, int | None]
    memory: Memory
    directories: tuple[Directory, ...] = field(default_factory=tuple)
    gpus: Gpus = field(default_factory=Gpus)
    calibration: probe.Probe | None = None  # None: nobody asked

    @property
    def problems(self) -> list[str]:
        """What does not work of that which this version needs."""
        library = self.machine.library
        found = [] if library.ok else [library.why]
        found += [self.memory.problem] if self.memory.problem else []
        if self.calibration is not None and not self.calibration.ok:
            found.append(f"copy engines: {self.calibration.why}")
        return found + [f"{place.path}: {place.problem}" for place in self.directories if place.problem]

    @property
    def ok(self) -> bool:
        """Whether all that this version needs works."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        names = ("library", "cuda", "cupy", "gds", "nvml", "io_uring")
        return {
            "ok": self.ok,
            "problems": self.problems,
            "versions": self.versions,
            **{name: as_object(getattr(self.machine, name)) for name in names},
            "limits": self.limits,
            "memory": asdict(self.memory),
            "directories": [place.as_json() for place in self.directories],
            "gpus": [asdict(gpu) | {"link_why": gpu.link_why} for gpu in self.gpus.gpus],
            "gpus_why": self.gpus.why,
            "calibration": None if self.calibration is None else as_object(self.calibration),
        }


def examine(plan: Plan) -> Report:
    """Looks at everything; what does not answer is given up after a while, and said."""
    machine = probe.machine(plan.timeout_s)
    places = [check_directory(path, capacity_bytes=plan.capacity_bytes) for path in plan.directories]
    return Report(
        versions=probe.versions(),
        machine=machine,
        limits=probe.limits(),
        memory=plan.memory(),
        directories=tuple(_asked(place, machine.cuda, plan.timeout_s) for place in places),
        gpus=ask_gpus(plan.timeout_s) if machine.nvml.ok else Gpus(why=machine.nvml.why),
        calibration=calibration(machine.cuda, plan.timeout_s) if plan.calibrate else None,
    )


def check_directory(
    path: Path, timeout_s: float = _DIRECTORY_TIMEOUT_S, *, capacity_bytes: int | None = None
) -> Directory:
    """Tries a directory as an open would; on a thread that is left behind where a dead mount holds it."""
    answer: list[Directory] = []

    def attempt() -> None:
        try:
            answer.append(_fit(_try(path), path, capacity_bytes))
        except (KvxferError, OSError) as exc:
            answer.append(Directory(path=str(path), problem=str(exc)))

    thread = threading.Thread(target=attempt, name="kvx-doctor", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answer[0] if answer else Directory(path=str(path), problem=f"no answer within {timeout_s:g} s")


def _asked(place: Directory, cuda: probe.Probe, timeout_s: float) -> Directory:
    """With what is asked in processes of its own."""
    wear = None if place.wear is None else ask_wear(place.wear, timeout_s)
    return replace(place, rung=_rung(place, cuda, timeout_s), wear=wear)


_LADDER = """
from pathlib import Path
from kvxfer.io.ladder import climb_here
answer(climb_here(Path({path!r}), timeout_s={timeout_s}).as_json())
"""


def _rung(place: Directory, cuda: probe.Probe, timeout_s: float) -> dict[str, Any] | None:
    """How a device's memory would get to a directory, by the ladder, which is climbed in a process of its own."""
    if place.problem or not place.tried:
        return None
    if not cuda.ok:
        step = {"reason": "no_device", "why": f"direct and compat off: no CUDA device: {cuda.why}"}
        return {"rung": "host", "steps": [step], "driver": {}, "settings": {}}
    answer = probe.ask(_LADDER.format(path=place.tried, timeout_s=timeout_s), _LADDER_STEPS * timeout_s)
    if answer.said is not None:
        return answer.said
    return {"rung": "host", "steps": [{"reason": "failed", "why": answer.why}], "driver": {}, "settings": {}}


def _fit(found: Directory, path: Path, capacity_bytes: int | None) -> Directory:
    """Whether a capacity that was asked for can be had, what a root holds already included."""
    if capacity_bytes is None or found.problem or found.free_bytes is None:
        return found
    held = 0
    if found.root is not None:
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        held = sum(os.lstat(file).st_blocks * 512 for file in files if os.path.lexists(file))
    if capacity_bytes <= found.free_bytes + held:
        return found
    return replace(
        found,
        problem=f"capacity_bytes={capacity_bytes} does not fit: {found.free_bytes} bytes are free, the root has {held}",
    )


def _try(path: Path) -> Directory:
    kind = filesystem_type(path)
    found = Directory(path=str(path), filesystem=kind, network=kind in NETWORK_FILESYSTEMS)
    if found.network:  # not tried: it may be far away, and a store refuses it
        return replace(found, problem=f"{kind} is a network file system; a store needs a local one (ext4, xfs, ...)")
    nearest = path.absolute()
    while not nearest.exists():
        if nearest.is_symlink():
            return replace(found, problem=f"{nearest} is a symbolic link that leads nowhere: no directory can be made")
        nearest = nearest.parent
    room = os.statvfs(nearest)
    found = replace(
        found,
        tried=str(nearest),
        free_bytes=room.f_bavail * room.f_frsize,
        free_inodes=room.f_favail if room.f_files else None,
        drive=drive_of(nearest),
        writes=DriveWatch(nearest).look(),
        wear=drives_under(nearest),
    )
    if not nearest.is_dir():
        return replace(found, problem=f"{nearest} is no directory")
    try:
        info = read_root(path) if (path / ROOT_FILE).exists() else None
        mode = probe_mode(nearest)
    except KvxferError as exc:
        return replace(found, problem=str(exc))
    direct, why = mode.direct, mode.why
    alignment = mode.alignment
    uring, uring_why = try_uring(nearest, mode)
    if info is not None:
        if direct and mode.alignment > info.alignment:
            direct = False
            why += f"; direct I/O off: the root is aligned to {info.alignment} for ever"
        alignment = info.alignment
    return replace(
        found,
        io_mode="posix direct" if direct else "posix buffered",
        why=why,
        uring=uring,
        uring_why=uring_why,
        alignment=alignment,
        root=None if info is None else info.body(),
    )
