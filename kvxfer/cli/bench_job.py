"""`kvxfer bench gds`, run: files, bursts, checks, and what they come to."""

from __future__ import annotations

import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.cli import bench_fio
from kvxfer.cli.bench_check import Checker, Made, OnlyRead
from kvxfer.cli.bench_content import PAGE, Content
from kvxfer.cli.bench_files import given, made
from kvxfer.cli.bench_lanes import READ, WRITE, Burst, Lanes, Mover, empty_calls, percentiles
from kvxfer.cli.bench_memory import Memory
from kvxfer.cli.bench_plan import Plan
from kvxfer.cli.bench_ways import Opened, Place, Way, choose
from kvxfer.errors import ConfigError, DeviceError
from kvxfer.io.system import sys_fsync
from kvxfer.nvml import Gpus, ask_gpus
from kvxfer.topology import Drive, drive_of, pci_device

SCHEMA = 1
OK, WRONG, ERRORS, FEW = "ok", "WRONG", "errors", "too few"
LEAST_REQUESTS = 30  # below it there is no result
BURST_BYTES = 256 << 20  # a burst's memory: beyond what caches hold
_BURST_REQUESTS = 1 << 15
_MOST_WRONG = 8  # texts that are kept
_MOST_ERRORS = 1000  # of a size
_NAMES = {READ: "read", WRITE: "write"}


@dataclass(slots=True, kw_only=True)
class Part:
    """Requests of one kind."""

    operation: str
    requests: int
    gbps: float  # 1e9 bytes a second, median over the repetitions
    gbps_runs: list[float]
    iops: float  # likewise
    latency_us: dict[str, float | None]  # over all repetitions; None: too few for it


@dataclass(slots=True, kw_only=True)
class Row:
    """One size of request. No speed where anything was wrong."""

    size: int
    status: str = OK
    why: str = ""
    parts: list[Part] = field(default_factory=list)
    requests: int = 0  # that were made, timed; those that failed included
    seconds: float = 0.0  # timed
    checked_bytes: int = 0
    wrong: list[str] = field(default_factory=list)  # the first few
    wrong_requests: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # requests by errno; short: the file ended
    extra_calls: int = 0  # beyond one for each request: after a short transfer the rest is asked for again
    cpu_cores: float | None = None  # busy on average, the bench's own work in the timed part included
    cpu_s_per_gb: float | None = None
    link_percent: float | None = None  # None: not known, or not crossed
    drive_percent: float | None = None
    tool_percent: float | None = None  # of the requests that the bench could make if they took no time

    @property
    def gbps(self) -> float:
        """Of all parts together."""
        return sum(part.gbps for part in self.parts)


@dataclass(slots=True, kw_only=True)
class Report:
    """What was run, how, and what came of it."""

    plan: Plan
    way: Way
    memory: str
    used_bytes: int  # of the files, in all
    seed: int | None
    verified: str = ""
    empty_calls_per_s: float = 0.0
    drive: Drive
    drive_gbps: float | None
    drive_why: str
    link_gbps: float | None
    link_why: str
    rows: list[Row] = field(default_factory=list)
    peer: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no byte was wrong and no request failed."""
        return not any(row.status == WRONG or row.errors for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        plan = asdict(self.plan) | {"targets": [str(each) for each in self.plan.targets], "seed": self.seed}
        plan["plot"] = None if self.plan.plot is None else str(self.plan.plot)
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "options": plan,
            "mode": self.way.mode,
            "memory": self.memory,
            "used_bytes": self.used_bytes,
            "why": self.way.why,
            "steps": list(self.way.steps),
            "alignment": self.way.alignment,
            "verified": self.verified,
            "empty_calls_per_s": self.empty_calls_per_s,
            "drive": asdict(self.drive) | {"gbps": self.drive_gbps, "gbps_why": self.drive_why},
            "link": {"gbps": self.link_gbps, "why": self.link_why},
            "rows": [asdict(row) for row in self.rows],
            "peer": self.peer,
        }


def run(plan: Plan, on_row: Callable[[Report, Row], None] | None = None) -> Report:
    """Does it all.

    Args:
        on_row: told of every row as it comes.

    Raises:
        ConfigError: the plan cannot be done here; nothing was touched.
        IOFault: files cannot be made, filled or read at all; those made are gone.
    """
    peer = bench_fio.find(plan)
    place, directory = _place(plan)
    used = given(plan.targets, plan.span_bytes) if directory is None else None
    way = choose(plan, place)
    with ExitStack() as stack:
        stack.callback(way.close)
        if used is None:
            each = plan.span_bytes // plan.threads // PAGE * PAGE
            paths = stack.enter_context(made(place.directory, plan.threads, each))
            used = [each] * plan.threads
        else:
            paths = list(plan.targets)
        writable = directory is not None or plan.overwrite
        files = [way.open(path, writable=writable) for path in paths]
        for file in files:
            stack.callback(file.close)
        bench = _Bench(plan, way, files, used, stack)
        report = _report(plan, way, bench.memory.kind, place, sum(used))
        checker: Checker
        if writable:
            report.seed = plan.seed if plan.seed is not None else secrets.randbits(64)
            checker = Made(Content(report.seed), used, way.mode)
            bench.fill(checker, paths)
        else:
            checker = OnlyRead(paths, used)
        report.verified = checker.said
        report.empty_calls_per_s = empty_calls(plan.threads, plan.depth, bench.nothing)
        for size in plan.sizes:
            row = bench.measure(size, checker)
            _compare(row, report)
            report.rows.append(row)
            if on_row is not None:
                on_row(report, row)
            if peer is not None and directory is not None:
                report.peer.append(bench_fio.run(peer, plan, way.mode, directory, size))
    return report


def _place(plan: Plan) -> tuple[Place, Path | None]:
    """Where a way is tried, and the directory in which files are made; None where files were given."""
    first = plan.targets[0]
    if not first.exists():
        raise ConfigError(f"{first} does not exist")
    if first.is_dir():
        if len(plan.targets) > 1:
            raise ConfigError("give one directory, or files: a drive at a time")
        if plan.overwrite:
            raise ConfigError(f"--overwrite: {first} is a directory, where files are made and removed")
        return Place(first, None), first
    if plan.peer is not None:
        raise ConfigError(f"--peer {plan.peer}: only in a directory, where it makes files of its own")
    if plan.writes and not plan.overwrite:
        raise ConfigError(f"--operation {plan.operation} destroys what {first} holds: give --overwrite, or a directory")
    return Place(first.parent, None if plan.overwrite else first), None


def _report(plan: Plan, way: Way, memory: str, place: Place, used: int) -> Report:
    drive = drive_of(place.sample or place.directory)
    if plan.drive_gbps is not None:
        drive_gbps, drive_why = plan.drive_gbps, "--drive-gbps"
    elif drive.link_bytes_per_s is not None:
        drive_gbps, drive_why = drive.link_bytes_per_s / 1e9, f"its link, {', '.join(map(str, drive.links))}"
    else:
        drive_gbps, drive_why = None, f"{drive.why}; --drive-gbps says it"
    link_gbps, link_why = None, "not crossed: the memory is the host's"
    if memory == "device":
        link_gbps, link_why = _link(ask_gpus(), way)
    return Report(
        plan=plan, way=way, memory=memory, used_bytes=used, seed=None, drive=drive, drive_gbps=drive_gbps,
        drive_why=drive_why, link_gbps=link_gbps, link_why=link_why,
    )  # fmt: skip


def _link(seen: Gpus, way: Way) -> tuple[float | None, str]:
    """Of the GPU whose memory is moved: CUDA and NVML may number them otherwise, and CUDA may see but some."""
    if not seen.gpus:
        return None, seen.why
    try:
        bus = way.bus()
    except DeviceError as exc:
        return None, f"of which GPU: {exc}"
    gpu = next((gpu for gpu in seen.gpus if gpu.bus is not None and pci_device(gpu.bus) == pci_device(bus)), None)
    if gpu is None:
        return None, f"NVML tells of no GPU at {bus}"
    link = gpu.link_max or gpu.link  # what it may be under load
    if link is None or link.bytes_per_s is None:
        return None, gpu.missing.get("link", "of a generation that is not known")
    return link.bytes_per_s / 1e9, f"{link} of GPU {gpu.index}"


def _compare(row: Row, report: Report) -> None:
    if row.status in (WRONG, FEW):
        return
    if report.link_gbps:
        row.link_percent = 100 * row.gbps / report.link_gbps
    if report.drive_gbps:
        row.drive_percent = 100 * row.gbps / report.drive_gbps
    if report.empty_calls_per_s:
        row.tool_percent = 100 * sum(part.iops for part in row.parts) / report.empty_calls_per_s


class _Bench:
    """Files, memory and lanes of one run."""

    def __init__(self, plan: Plan, way: Way, files: list[Opened], used: list[int], stack: ExitStack) -> None:
        self.plan, self.way, self.files, self._used = plan, way, files, used
        largest = max(plan.sizes)
        most = max(max(plan.lanes, min(BURST_BYTES // size, _BURST_REQUESTS)) * size for size in plan.sizes)
        self.memory: Memory = way.memory(min(most, max(plan.span_bytes, plan.lanes * largest)), largest)
        self._stuck = False  # a request may still move memory
        stack.callback(self._release)
        self._places: list[Any] = []
        self._random = np.random.default_rng(plan.seed)
        empty = self.memory.place(0, PAGE)
        first = files[0]
        self.nothing: Mover = lambda op, file, offset, slot, nbytes: first.read(empty, 0, 0)

    def fill(self, checker: Made, paths: list[Path]) -> None:
        """Gives files content, and has the system write it out and forget it."""
        checker.fill(self.files, self.memory, min(8 << 20, self.memory.nbytes) // PAGE * PAGE)
        for file, path in zip(self.files, paths, strict=True):
            if (fd := getattr(file, "fd", None)) is not None:
                sys_fsync(fd, path)
            self.way.forget(file)

    def move(self, op: int, file: int, offset: int, slot: int, nbytes: int) -> int:
        """See Mover."""
        if op == READ:
            return self.files[file].read(self._places[slot], nbytes, offset)
        return self.files[file].write(self._places[slot], nbytes, offset)

    def measure(self, size: int, checker: Checker) -> Row:
        """One size: a burst that does not count, then the repetitions."""
        plan, row = self.plan, Row(size=size)
        blocks = _Blocks(self._used, plan, size, self._random)
        if blocks.problem:
            row.status, row.why = FEW, blocks.problem
            return row
        checker.begin(size)
        slots = min(max(plan.lanes, min(BURST_BYTES // size, _BURST_REQUESTS)), self.memory.nbytes // size)
        self._places = [self.memory.place(slot * size, size) for slot in range(slots)]
        tally = _Tally(row)
        with self._lanes() as lanes:
            share_s = plan.duration_s / plan.repetitions
            share_bytes = None if plan.limit_bytes is None else max(size, plan.limit_bytes // plan.repetitions)
            self._burst(lanes, blocks, slots, checker, tally, min(share_s, 1.0), warm_up=True)
            for _ in range(plan.repetitions):
                tally.next_run()
                while tally.more(share_s, share_bytes):
                    left = slots if share_bytes is None else min(slots, -(-(share_bytes - tally.run_bytes) // size))
                    made = self._burst(lanes, blocks, left, checker, tally, share_s - tally.run_s)
                    if not made or tally.over:
                        break
                if tally.over:
                    break
        tally.finish()
        return row

    @contextmanager
    def _lanes(self) -> Iterator[Lanes]:
        lanes = Lanes(self.plan.threads, self.plan.depth, self.move)
        try:
            yield lanes
        finally:
            self._stuck |= not lanes.close()

    def _release(self) -> None:
        """Gives the memory back, unless a request that hangs may touch it yet: then the end of the process does."""
        if not self._stuck:
            self.memory.close()

    def _burst(
        self, lanes: Lanes, blocks: _Blocks, slots: int, checker: Checker, tally: _Tally, seconds: float,
        warm_up: bool = False,
    ) -> bool:  # fmt: skip
        """One burst, timed, then checked; whether any request was made."""
        burst = blocks.draw(slots, checker)
        if not len(burst.op):
            return False
        checker.prepare(burst, self.memory)
        for file in self.files:
            self.way.forget(file)
        lanes.run(burst, seconds)
        checker.settle(burst)
        done = burst.done
        unread: dict[int, str] = {}
        written = done & (burst.op == WRITE)
        if written.any():
            back = Burst(np.full_like(burst.op, READ), burst.file, burst.offset, np.where(written, burst.thread, -1),
                         burst.nbytes)  # fmt: skip
            for slot in np.flatnonzero(written).tolist():
                self.memory.poison(slot * burst.nbytes, burst.nbytes)
            lanes.run(back)
            unread = back.failed
        readable = done.copy()
        readable[list(unread)] = False
        wrong = checker.wrong(burst, self.memory, readable)
        wrong += [f"a write could not be read back to be checked: {why}" for why in unread.values()]
        tally.take(burst, wrong, int(readable.sum()), warm_up)
        return bool(burst.made.any())


class _Blocks:
    """Which places of the files a burst's requests go to."""

    def __init__(self, used: list[int], plan: Plan, size: int, random: np.random.Generator) -> None:
        self._plan, self._size, self._random = plan, size, random
        self._parts = _split(used, plan.threads, size)
        self._next = [0] * plan.threads
        short = [len(offsets) for _, offsets in self._parts if len(offsets) < plan.depth]
        self.problem = ""
        if short:
            self.problem = (
                f"a thread's part of the files holds {short[0]} requests of {size} bytes, {plan.depth} are in flight"
            )

    def draw(self, slots: int, checker: Checker) -> Burst:
        """At most `slots` requests to as many different places, each thread's to its own part."""
        plan = self._plan
        per_thread = max(1, slots // plan.threads)
        files, offsets, threads = [], [], []
        for thread, (file, offset) in enumerate(self._parts[: max(1, slots)]):
            count = min(per_thread, len(offset))
            if plan.layout == "random":
                chosen = self._random.choice(len(offset), count, replace=False)
            else:
                chosen = (self._next[thread] + np.arange(count)) % len(offset)
                self._next[thread] = int(chosen[-1]) + 1
            files.append(file[chosen])
            offsets.append(offset[chosen])
            threads.append(np.full(count, thread))
        file, offset, thread_of = np.concatenate(files), np.concatenate(offsets), np.concatenate(threads)
        if plan.operation == "mixed":
            op = np.where(self._random.random(len(file)) * 100 < plan.read_percent, READ, WRITE)
        else:
            op = np.full(len(file), READ if plan.operation == "read" else WRITE)
        keep = (op == WRITE) | checker.readable(file, offset, self._size)
        return Burst(op[keep].astype(np.uint8), file[keep], offset[keep], thread_of[keep], self._size)


def _split(used: list[int], threads: int, size: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Each thread's requests, as (files, offsets): whole files dealt out, or parts where there are more threads."""
    blocks = [(file, np.arange(nbytes // size, dtype=np.int64) * size) for file, nbytes in enumerate(used)]
    mine: list[list[tuple[int, NDArray[np.int64]]]] = [[] for _ in range(threads)]
    if len(blocks) >= threads:
        for index, each in enumerate(blocks):
            mine[index % threads].append(each)
    else:
        for file, offsets in blocks:
            owners = range(file, threads, len(blocks))
            for owner, part in zip(owners, np.array_split(offsets, len(owners)), strict=True):
                mine[owner].append((file, part))
    return [
        (
            np.concatenate([np.full(len(offsets), file, dtype=np.int64) for file, offsets in parts]),
            np.concatenate([offsets for _, offsets in parts]),
        )
        for parts in mine
    ]


class _Tally:
    """Adds up a row."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._errors: Counter[str] = Counter()
        self._runs: list[dict[int, int]] = []  # of each repetition: requests done, by kind
        self._seconds: list[float] = []
        self._latency: dict[int, list[NDArray[np.int64]]] = {READ: [], WRITE: []}
        self._cpu_s = 0.0

    @property
    def run_s(self) -> float:
        """Timed so far in this repetition."""
        return self._seconds[-1]

    @property
    def run_bytes(self) -> int:
        """Moved so far in it."""
        return sum(self._runs[-1].values()) * self._row.size

    @property
    def over(self) -> bool:
        """Whether nothing is to be gained from going on."""
        return bool(self._row.wrong_requests) or self._errors.total() >= _MOST_ERRORS

    def next_run(self) -> None:
        """Another repetition begins."""
        self._runs.append({READ: 0, WRITE: 0})
        self._seconds.append(0.0)

    def more(self, seconds: float, nbytes: int | None) -> bool:
        """Whether this repetition goes on."""
        return self.run_s < seconds * 0.98 and (nbytes is None or self.run_bytes < nbytes)

    def take(self, burst: Burst, wrong: list[str], checked: int, warm_up: bool) -> None:
        """A burst was made and checked. One to warm up counts where something was wrong."""
        row = self._row
        row.wrong_requests += len(wrong)
        row.wrong += wrong[: _MOST_WRONG - len(row.wrong)]
        row.checked_bytes += checked * row.size
        self._errors.update(burst.failed.values())
        if warm_up:
            return
        done = burst.done
        for kind in (READ, WRITE):
            of_kind = done & (burst.op == kind)
            self._runs[-1][kind] += int(of_kind.sum())
            self._latency[kind].append(burst.latency_ns[of_kind])
        self._seconds[-1] += burst.wall_s
        self._cpu_s += burst.cpu_s
        made = int(burst.made.sum())
        row.requests += made
        row.seconds += burst.wall_s
        row.extra_calls += max(0, burst.calls - made)

    def finish(self) -> None:
        """Fills in the row's figures."""
        row = self._row
        row.errors = dict(self._errors)
        if row.wrong_requests:
            row.status = WRONG
            row.why = f"{row.wrong_requests} requests with wrong bytes; the first: {row.wrong[0]}"
            return
        done = sum(sum(run.values()) for run in self._runs)
        if done < LEAST_REQUESTS or not all(self._seconds):
            row.status = FEW
            row.why = f"{done} requests are too few for a result (at least {LEAST_REQUESTS}): longer, or smaller"
            return
        if row.errors:
            row.status = ERRORS
            row.why = ", ".join(f"{name} {count} times" for name, count in row.errors.items())
        row.parts = [self._part(kind) for kind in (READ, WRITE) if any(run[kind] for run in self._runs)]
        row.cpu_cores = self._cpu_s / row.seconds
        row.cpu_s_per_gb = self._cpu_s / (done * row.size / 1e9)

    def _part(self, kind: int) -> Part:
        rates = [run[kind] / seconds for run, seconds in zip(self._runs, self._seconds, strict=True)]
        return Part(
            operation=_NAMES[kind],
            requests=sum(run[kind] for run in self._runs),
            gbps=statistics.median(rates) * self._row.size / 1e9,
            gbps_runs=[rate * self._row.size / 1e9 for rate in rates],
            iops=statistics.median(rates),
            latency_us=percentiles(np.concatenate(self._latency[kind])),
        )
