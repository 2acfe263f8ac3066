"""Pack + one large copy, the kernel straight to pinned memory, and cudaMemcpyBatchAsync, over many fragments."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.gpu.lane import Case, measure
from bench.gpu.sections import Skip, Work
from bench.gpu.settings import Settings
from kvxfer import probe
from kvxfer.device.calibration import BUDGET_S, DIRECTIONS, Calibration, calibrate, points
from kvxfer.device.copy_bench import BLOCK_FRAGMENTS, POISON, CopyBench, engines_of
from kvxfer.errors import DeviceError

__all__ = ["calibration", "run"]

BAR = 95.0  # percent of one large copy, where there are tens of MiB: design of the project


def run(work: Work) -> None:
    """Every engine at every size and count, both ways; and, for tens of MiB, beside one large copy."""
    settings: Settings = work.common.settings
    device = probe.cuda() if settings.device != "cpu" else probe.Probe(False, "these are tests")
    engines, cuda, why = engines_of(device)
    if why:
        work.cut(why)
    bench = CopyBench(settings.device, cuda)
    full = [(fragment, _whole(settings.filled_bytes // fragment)) for fragment in settings.fragments]
    grid = [(fragment, _whole(count)) for count in settings.counts for fragment in settings.fragments]
    for fragment, fragments in dict.fromkeys([*full, *grid]):
        name = f"{fragments:,} x {fragment} B"
        if fragment * fragments > settings.copy_bytes:
            work.cut(f"{name}: more than {settings.copy_bytes >> 20} MiB")
            continue
        if work.over(name):
            continue
        beside = (fragment, fragments) in full
        bench.prepare(fragment, fragments)
        for direction in DIRECTIONS:
            if beside and not work.over(f"{direction} {name}, one copy"):
                _one_copy(work, bench, direction, name)
            for engine in engines:
                if engine == "batch" and fragments > settings.most_in_batch:
                    work.cut(f"{direction} {name}, batch: more than {settings.most_in_batch:,} fragments")
                elif not work.over(f"{direction} {name}, {engine}"):
                    _engine(work, bench, direction, engine, name, beside)
    bench.close()


def _whole(fragments: int) -> int:
    return max(1, fragments // BLOCK_FRAGMENTS) * BLOCK_FRAGMENTS


def _engine(work: Work, bench: CopyBench, direction: str, engine: str, name: str, beside: bool) -> None:
    assert bench.work is not None
    try:
        step = bench.step(engine, direction)
        case = Case(
            case=f"{direction} {name}", impl=engine, step=step, nbytes=bench.work.nbytes,
            poison=lambda: bench.poison(direction), check=lambda: checked(bench, direction),
        )  # fmt: skip
        measure(work, bench.lane, case, of=f"one copy, {direction} {name}" if beside else "",
                bar=BAR if beside and engine == "pack" else None)  # fmt: skip
    except DeviceError as exc:  # an engine that this machine has not
        work.cut(f"{direction} {name}, {engine}: {exc}")


def checked(bench: CopyBench, direction: str) -> str | None:
    """None where the bytes are right."""
    try:
        bench.check(direction)
    except DeviceError as exc:
        return str(exc)
    return None


def _one_copy(work: Work, bench: CopyBench, direction: str, name: str) -> None:
    """As many bytes, already side by side, by one copy between the device and pinned memory."""
    assert bench.work is not None
    nbytes = bench.work.nbytes
    host, stage = (memory.view(-1)[:nbytes] for memory in (bench.host, bench.stage))
    target, source = (host, stage) if direction == "store" else (stage, host)

    def poison() -> None:
        source.random_()
        target.fill_(POISON)

    def check() -> str | None:
        bench.lane.synchronize()
        return None if torch.equal(target.cpu(), source.cpu()) else "the copy differs"

    step: Callable[[], None] = lambda: target.copy_(source, non_blocking=True)  # noqa: E731
    case = Case(
        case=f"{direction} {name}", impl="one copy", step=step, poison=poison, check=check, nbytes=nbytes
    )  # fmt: skip
    measure(work, bench.lane, case, keep=f"one copy, {direction} {name}")


def calibration(work: Work) -> None:
    """What `kvxfer doctor --calibrate` would measure and choose, from nothing, in its budget."""
    settings: Settings = work.common.settings
    if settings.device == "cpu":
        raise Skip("these are tests")
    engines, cuda, _ = engines_of(probe.cuda())
    todo, start = list(points()), time.monotonic()
    found = calibrate(lambda: CopyBench(settings.device, cuda), todo, engines, BUDGET_S)
    took = time.monotonic() - start
    for engine, why in found.wrong.items():
        work.wrong("calibration", engine, why)
    known = Calibration(engines=engines, seconds=found.seconds, wrong=found.wrong)
    work.add(
        "calibration", "all engines", ms=took * 1e3,
        more={"points": len(found.seconds), "of": len(todo), "notes": found.notes,
              "choices": [{**point._asdict(), "engine": known.choose(*point)} for point in found.seconds]},
    )  # fmt: skip
