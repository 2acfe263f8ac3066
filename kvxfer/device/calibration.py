"""Which copy engine for which fragments, on the device in hand: measured in two seconds, and kept.

Three engines move fragments between pages on a device and pinned host memory:

    pack    the Triton kernel to or from staging on the device, and one large copy
    zero    the same kernel straight to or from pinned host memory
    batch   cudaMemcpyBatchAsync over the fragments

Which is fastest depends on the direction, on how large a fragment is and on how many there are. `obtain` takes what
was measured before on this device, with this driver and these versions, and measures what is missing, within its
budget; `Calibration.choose` answers for any job from the nearest that was measured. An engine that moved wrong bytes is
never chosen.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from kvxfer.device import calibration_cache as cache
from kvxfer.device.calibration_cache import DIRECTIONS, ENGINES, PACK, ZERO, Identity, Kept, Point
from kvxfer.errors import ConfigError, DeviceError

__all__ = [
    "AUTO",
    "BUDGET_S",
    "DIRECTIONS",
    "ENGINES",
    "PACK",
    "ZERO",
    "Bench",
    "Calibration",
    "Identity",
    "Point",
    "WrongBytes",
    "calibrate",
    "obtain",
    "points",
    "wanted",
]

AUTO = "auto"
VARIABLE = "KVXFER_COPY_ENGINE"
BUDGET_S = 2.0
FRAGMENTS = (256, 4096, 1024, 16 << 10, 64 << 10)  # bytes; the most frequent first: pages of NHD, of HND
COUNTS = (4096, 256, 16)
MOST_BYTES = 16 << 20  # of one point
TIE = 0.05  # within so much of the fastest, the engine that is first in ENGINES is taken


class WrongBytes(DeviceError):
    """An engine moved other bytes than it was asked to."""


class Bench(Protocol):
    """What measures. All calls come from one thread."""

    def timed(self, engine: str, direction: str, fragment_bytes: int, fragments: int) -> float:
        """Seconds that so many fragments take, whose bytes were compared before and after.

        Raises:
            WrongBytes: they differ.
            Exception: the engine cannot do it.
        """

    def close(self) -> None:
        """Gives its memory back."""


def points() -> Iterator[Point]:
    """What is measured, the most important first."""
    for count in COUNTS:
        for fragment in FRAGMENTS:
            if fragment * count <= MOST_BYTES:
                for direction in DIRECTIONS:
                    yield Point(direction, fragment, count)


def wanted(
    config: str | Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The engine that somebody asked for, or "auto", by direction. KVXFER_COPY_ENGINE goes before `config`.

    Args:
        config: an engine for both directions, or {"store": engine, "load": engine}, either of which may be left out.

    Raises:
        ConfigError: an unknown engine or direction.
    """
    allowed = (*ENGINES, AUTO)
    value = (os.environ if environment is None else environment).get(VARIABLE)
    if value is not None:
        if value not in allowed:
            raise ConfigError(f"{VARIABLE}={value!r} must be one of {', '.join(allowed)}")
        return dict.fromkeys(DIRECTIONS, value)
    if config is None or isinstance(config, str):
        config = dict.fromkeys(DIRECTIONS, AUTO if config is None else config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"copy_engine={config!r} must be one of {', '.join(allowed)}, or a mapping of directions")
    if unknown := sorted(str(key) for key in config if key not in DIRECTIONS):
        raise ConfigError(f"unknown copy_engine keys {unknown}; known keys are {sorted(DIRECTIONS)}")
    for direction, engine in config.items():
        if not isinstance(engine, str) or engine not in allowed:
            raise ConfigError(f"copy_engine[{direction!r}]={engine!r} must be one of {', '.join(allowed)}")
    return dict.fromkeys(DIRECTIONS, AUTO) | dict(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and what follows from it.

    Raises:
        ConfigError: an engine was asked for that cannot be used here.
        WrongBytes: it, or every engine, moved wrong bytes.
    """

    engines: tuple[str, ...]  # that can be used here, in ENGINES' order
    seconds: Mapping[Point, Mapping[str, float | None]] = field(default_factory=dict)  # None: the engine failed
    wrong: Mapping[str, str] = field(default_factory=dict)  # engine: which bytes
    asked: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(DIRECTIONS, AUTO))
    source: str = "nothing was measured"
    notes: tuple[str, ...] = ()  # what failed, was cut short or could not be kept
    file: Path | None = None  # where it is kept
    _best: Mapping[str, Mapping[int, Mapping[int, str]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for direction, engine in self.asked.items():
            if engine != AUTO and engine not in self.engines:
                raise ConfigError(
                    f"the copy engine {engine!r} was asked for {direction}s and cannot be used here: "
                    f"{', '.join(self.engines) or 'none'} can"
                )
            if engine in self.wrong:
                raise WrongBytes(f"the copy engine {engine!r} moves wrong bytes here: {self.wrong[engine]}")
        if not self.usable:
            said = "; ".join(f"{engine}: {why}" for engine, why in self.wrong.items())
            raise WrongBytes(f"no copy engine moves the right bytes here: {said or 'there is none'}")
        best: dict[str, dict[int, dict[int, str]]] = {direction: {} for direction in DIRECTIONS}
        for point, measured in self.seconds.items():
            if (best_one := self._fastest(measured)) is not None:
                best[point.direction].setdefault(point.fragment_bytes, {})[point.fragments] = best_one
        object.__setattr__(self, "_best", MappingProxyType(best))

    @property
    def usable(self) -> tuple[str, ...]:
        """Engines that can be used and moved no wrong bytes."""
        return tuple(engine for engine in self.engines if engine not in self.wrong)

    def knows(self, direction: str) -> bool:
        """Whether `choose` answers by what was asked for or measured."""
        return self.asked[direction] != AUTO or bool(self._best[direction])

    def choose(self, direction: str, fragment_bytes: int, fragments: int) -> str:
        """The engine for so many `fragments` of that size: that of the nearest point which was measured.

        Where there is none, the first that can be used.
        """
        if (engine := self.asked[direction]) != AUTO:
            return engine
        by_fragment = self._best[direction]
        if not by_fragment:
            return self.usable[0]
        by_count = by_fragment[_nearest(by_fragment, fragment_bytes)]
        return by_count[_nearest(by_count, fragments)]

    def as_json(self) -> dict[str, Any]:
        """For `--json`: engines, wrong, asked, source, notes, file, points (with their seconds and the choice)."""
        return {
            "engines": list(self.engines),
            "wrong": dict(self.wrong),
            "asked": dict(self.asked),
            "source": self.source,
            "notes": list(self.notes),
            "file": None if self.file is None else str(self.file),
            "points": [
                {
                    "direction": point.direction,
                    "fragment_bytes": point.fragment_bytes,
                    "fragments": point.fragments,
                    "seconds": dict(measured),
                    "engine": self.choose(*point),
                }
                for point, measured in sorted(self.seconds.items())
            ],
        }

    def _fastest(self, measured: Mapping[str, float | None]) -> str | None:
        times = {engine: taken for engine in self.usable if (taken := measured.get(engine)) is not None}
        if not times:
            return None
        least = min(times.values())
        return next(engine for engine in ENGINES if times.get(engine, math.inf) <= least * (1 + TIE))


def _nearest(classes: Mapping[int, Any], value: int) -> int:
    """The class whose ratio to `value` is nearest to 1; of two, the smaller. Monotone in `value`."""
    exact = math.log2(max(value, 1))
    return min(classes, key=lambda one: (abs(math.log2(one) - exact), one))


def obtain(
    bench: Callable[[], Bench],
    identity: Identity,
    engines: Sequence[str],
    *,
    config: str | Mapping[str, str] | None = None,
    folder: Path | None = None,
    budget_s: float = BUDGET_S,
    linger_s: float = 0.0,
) -> Calibration:
    """What is known of this device, and, within the budget, what is not yet.

    Args:
        bench: makes what measures; not called where nothing is to be measured.
        engines: that can be used here.
        config: as `wanted` takes it.
        folder: where it is kept; None: kvxfer's folder in the user's cache directory, if there is one.
        budget_s, linger_s: as `calibrate` takes them.

    Raises:
        ConfigError: an engine was asked for that is unknown or cannot be used here.
        WrongBytes: the engine that was asked for, or every one that could be used, moves wrong bytes.
    """
    asked = wanted(config)
    usable = tuple(engine for engine in ENGINES if engine in engines)
    if AUTO not in asked.values():
        return Calibration(engines=usable, asked=asked, source="given")
    folder = folder or cache.user_folder()
    kept, notes = cache.read(folder, identity)
    open_points = [point for point in points() if asked[point.direction] == AUTO]
    missing = [point for point in open_points if not _is_known(point, kept, usable)]
    if missing:
        found = calibrate(
            bench, missing, [engine for engine in usable if engine not in kept.wrong], budget_s, linger_s=linger_s
        )
        notes += found.notes
        kept = Kept({**kept.seconds, **found.seconds}, {**kept.wrong, **found.wrong})
        if found.seconds or found.wrong:
            notes += cache.write(folder, identity, kept)
    source = "kept" if not missing else "measured" if len(missing) == len(open_points) else "kept, the rest measured"
    return Calibration(
        engines=usable,
        seconds=kept.seconds,
        wrong=kept.wrong,
        asked=asked,
        source=source if kept.seconds else "nothing was measured",
        notes=tuple(notes),
        file=cache.path_of(folder, identity),
    )


def _is_known(point: Point, kept: Kept, engines: Sequence[str]) -> bool:
    measured = kept.seconds.get(point)
    return measured is not None and all(engine in measured or engine in kept.wrong for engine in engines)


@dataclass(slots=True)
class Found:
    """What a calibration came to."""

    seconds: dict[Point, dict[str, float | None]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def calibrate(
    bench: Callable[[], Bench],
    todo: Sequence[Point],
    engines: Sequence[str],
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
    linger_s: float = 0.0,
) -> Found:
    """Measures points in their order until they, or the budget, are at an end. Never waits for longer than that.

    But for `linger_s`, for what was cut off: where the process ends next, a kernel that was being compiled would be
    lost, and the next process would get no further.

    A point counts when every engine was tried on it. An engine that fails is not asked again in that direction; one
    that moves wrong bytes, not at all. What does not come back is left behind on its thread.
    """
    found, end = Found(), clock() + budget_s
    worker, failed = _Worker(bench), set[tuple[str, str]]()
    for done, point in enumerate(todo):
        taken: dict[str, float | None] = {}
        for engine in engines:
            if engine in found.wrong:
                continue
            if (engine, point.direction) in failed:
                taken[engine] = None
                continue
            answer = worker.timed((engine, *point), end - clock())
            if answer is None:
                found.notes.append(
                    f"the budget of {budget_s:g} s ended at {engine} for {point.fragments} fragments of "
                    f"{point.fragment_bytes} bytes ({point.direction}): {done} of {len(todo)} points were measured"
                )
                worker.end(linger_s)
                return found
            if isinstance(answer, WrongBytes):
                found.wrong[engine] = f"{point.direction} of {point.fragments} x {point.fragment_bytes} bytes: {answer}"
                found.notes.append(f"{engine} moved wrong bytes and is not used: {found.wrong[engine]}")
            elif isinstance(answer, BaseException):
                failed.add((engine, point.direction))
                taken[engine] = None
                found.notes.append(f"{engine} failed at a {point.direction}: {type(answer).__name__}: {answer}")
            else:
                taken[engine] = answer
        if any(seconds is not None for seconds in taken.values()):
            found.seconds[point] = taken
    worker.end()
    return found


class _Worker:
    """One thread that makes the bench and calls it, so that a device that hangs does not hold whoever asked."""

    def __init__(self, bench: Callable[[], Bench]) -> None:
        self._make = bench
        self._asked: queue.SimpleQueue[tuple[str, str, int, int] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def timed(self, arguments: tuple[str, str, int, int], within_s: float) -> float | BaseException | None:
        """Seconds, or what was raised; None: no answer within that time, after which nothing more may be asked."""
        if within_s <= 0:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvx-calibrate", daemon=True)
            self._thread.start()
        self._asked.put(arguments)
        try:
            return self._answers.get(timeout=within_s)
        except queue.Empty:
            return None

    def end(self, within_s: float = 0.0) -> None:
        """The thread closes the bench when it comes back, and ends; that is waited for so long at most."""
        self._asked.put(None)
        if self._thread is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        bench: Bench | None = None
        while (arguments := self._asked.get()) is not None:
            try:
                bench = bench or self._make()
                self._answers.put(_checked(bench.timed(*arguments)))
            except Exception as exc:  # whatever a driver or a compiler raises is why the engine is not used
                self._answers.put(exc)
        if bench is not None:
            bench.close()


def _checked(seconds: float) -> float:
    if not 0 < seconds < math.inf:
        raise DeviceError(f"{seconds!r} is no time")
    return seconds
