"""Which copy engine is chosen: over a bench that is a double, and answers from a formula."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.device import calibration
from kvxfer.device.calibration import (
    DIRECTIONS,
    ENGINES,
    Calibration,
    Identity,
    Point,
    WrongBytes,
    calibrate,
    obtain,
    points,
    wanted,
)
from kvxfer.errors import ConfigError, DeviceError
from kvxfer.testing import ManualClock

IDENTITY = Identity(device="Fake H200", uuid="GPU-1", driver="580.1", kvxfer="1.0", triton="3.6")
Seconds = Callable[[str, str, int, int], float]


def simple(engine: str, direction: str, fragment: int, fragments: int) -> float:
    """Zero-copy wins small stores, batches win large fragments of loads, packing the rest."""
    fixed = {"pack": 20e-6, "zero": 5e-6, "batch": 2e-6 + 1e-6 * fragments}[engine]
    speed = {"pack": 50e9, "zero": 50e9 if direction == "store" and fragments < 1000 else 20e9, "batch": 55e9}[engine]
    return fixed + fragment * fragments / speed


class FakeBench:
    """Answers `seconds`, and notes what it was asked, on which thread."""

    def __init__(self, seconds: Seconds = simple) -> None:
        self.seconds = seconds
        self.asked: list[tuple[str, str, int, int]] = []
        self.threads: set[str] = set()
        self.closed = threading.Event()
        self.made = 0

    def __call__(self) -> FakeBench:
        self.made += 1
        self.threads.add(threading.current_thread().name)
        return self

    def timed(self, engine: str, direction: str, fragment_bytes: int, fragments: int) -> float:
        self.threads.add(threading.current_thread().name)
        self.asked.append((engine, direction, fragment_bytes, fragments))
        return self.seconds(engine, direction, fragment_bytes, fragments)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv(calibration.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    for thread in threading.enumerate():
        if thread.name == "kvx-calibrate":
            thread.join(10)
            assert not thread.is_alive()


def of(seconds: dict[Point, dict[str, float | None]], **fields: object) -> Calibration:
    return Calibration(**{"engines": ENGINES, "seconds": seconds} | fields)


# ---- choosing


def test_the_fastest_is_chosen_where_it_was_measured(tmp_path: Path) -> None:
    found = obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path)
    assert found.source == "measured"
    assert set(found.seconds) == set(points())
    for point, measured in found.seconds.items():
        assert measured == {engine: simple(engine, *point) for engine in ENGINES}
        chosen = measured[found.choose(*point)]
        assert chosen is not None
        assert chosen <= 1.05 * min(seconds for seconds in measured.values() if seconds is not None)
    assert {found.choose(*point) for point in found.seconds} == set(ENGINES)


def test_the_points_are_in_bounds_and_the_pages_of_llama_come_first() -> None:
    order = list(points())
    assert order[:4] == [Point(d, f, 4096) for f in (256, 4096) for d in DIRECTIONS]
    assert len(order) == len(set(order)) == 26
    assert {point.fragment_bytes for point in order} == {256, 1024, 4096, 16384, 65536}
    assert all(point.fragment_bytes * point.fragments <= 16 << 20 for point in order)
    assert len(order) * len(ENGINES) * 0.02 < calibration.BUDGET_S  # 20 ms for each at the least


def test_the_nearest_class_answers_and_a_larger_job_never_gets_a_smaller_class() -> None:
    """Each class is told by an engine of its own."""
    seconds: dict[Point, dict[str, float | None]] = {
        Point("store", fragment, fragments): {engine: 1.0 if engine == best else 9.0 for engine in ENGINES}
        for (fragment, fragments), best in {
            (256, 16): "pack", (256, 4096): "zero", (65536, 16): "batch", (65536, 256): "pack",
        }.items()
    }  # fmt: skip
    found = of(seconds)
    assert [found.choose("store", 256, n) for n in (1, 16, 255, 256, 257, 10**6)] == ["pack"] * 4 + ["zero"] * 2
    assert [found.choose("store", f, 16) for f in (1, 256, 4095, 4096, 4097, 1 << 30)] == ["pack"] * 4 + ["batch"] * 2
    assert [found.choose("store", 65536, n) for n in (0, 64, 65, 4096)] == ["batch", "batch", "pack", "pack"]
    for sizes in ((256, 16), (256, 65536)):
        classes = dict.fromkeys(sizes)
        nearest = [calibration._nearest(classes, value) for value in range(0, 70_000, 7)]
        assert nearest == sorted(nearest)
        assert set(nearest) == set(sizes)


def test_directions_are_apart() -> None:
    found = of(
        {Point("store", 256, 16): {"pack": 2.0, "zero": 1.0}, Point("load", 256, 16): {"pack": 1.0, "zero": 2.0}}
    )
    assert (found.choose("store", 256, 16), found.choose("load", 256, 16)) == ("zero", "pack")


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"pack": 1.0, "zero": 1.0, "batch": 1.0}, "pack"),
        ({"pack": 1.04, "zero": 1.0, "batch": 1.0}, "pack"),
        ({"pack": 1.06, "zero": 1.04, "batch": 1.0}, "zero"),
        ({"pack": 1.06, "zero": 1.06, "batch": 1.0}, "batch"),
        ({"pack": None, "zero": 5.0, "batch": 6.0}, "zero"),
        ({"batch": 5.0}, "batch"),
        ({"pack": None, "zero": None, "batch": None}, "pack"),
        ({}, "pack"),
    ],
)
def test_of_equals_the_simpler_is_chosen(seconds: dict[str, float | None], chosen: str) -> None:
    assert of({Point("load", 256, 16): seconds}).choose("load", 256, 16) == chosen


def test_an_engine_that_cannot_be_used_here_is_not_chosen() -> None:
    """Though it was once measured: the library of batches is gone."""
    seconds: dict[Point, dict[str, float | None]] = {Point("load", 256, 16): {"pack": 3.0, "zero": 2.0, "batch": 1.0}}
    assert of(seconds, engines=("pack", "zero")).choose("load", 256, 16) == "zero"


# ---- measuring


def test_an_engine_that_fails_is_not_asked_again_in_that_direction() -> None:
    def seconds(engine: str, direction: str, fragment: int, fragments: int) -> float:
        if (engine, direction) == ("batch", "load"):
            raise RuntimeError("refused")
        return simple(engine, direction, fragment, fragments)

    bench = FakeBench(seconds)
    found = calibrate(bench, list(points()), ENGINES, 100)
    assert [ask for ask in bench.asked if ask[:2] == ("batch", "load")] == [("batch", "load", 256, 4096)]
    assert found.notes == ["batch failed at a load: RuntimeError: refused"]
    assert {taken["batch"] for point, taken in found.seconds.items() if point.direction == "load"} == {None}
    assert None not in {taken["batch"] for point, taken in found.seconds.items() if point.direction == "store"}
    assert bench.closed.wait(10)
    assert bench.threads == {"kvx-calibrate"}  # the context of a device belongs to a thread


def test_wrong_bytes_rule_an_engine_out_for_good(tmp_path: Path) -> None:
    """The fastest by far, right at first, wrong at one point: never chosen, anywhere, and not after a restart."""

    def seconds(engine: str, direction: str, fragment: int, fragments: int) -> float:
        if engine == "zero" and (direction, fragment, fragments) == ("load", 4096, 256):
            raise WrongBytes("3 of 1048576 bytes differ")
        return 1e-9 if engine == "zero" else simple(engine, direction, fragment, fragments)

    bench = FakeBench(seconds)
    found = obtain(bench, IDENTITY, ENGINES, folder=tmp_path)
    assert found.wrong == {"zero": "load of 256 x 4096 bytes: 3 of 1048576 bytes differ"}
    assert "moved wrong bytes and is not used" in found.notes[0]
    assert "zero" not in {found.choose(*point) for point in points()}
    assert [ask[0] for ask in bench.asked].count("zero") < len(list(points()))
    again = obtain(_never, IDENTITY, ENGINES, folder=tmp_path)
    assert (again.source, again.wrong) == ("kept", found.wrong)
    assert "zero" not in {again.choose(*point) for point in points()}
    with pytest.raises(DeviceError, match="'zero' moves wrong bytes here: load of 256"):
        obtain(_never, IDENTITY, ENGINES, folder=tmp_path, config={"store": "zero"})


def test_a_wrong_engine_stays_ruled_out_when_others_are_measured_later(tmp_path: Path) -> None:
    def seconds(engine: str, *place: object) -> float:
        if engine == "zero":
            raise WrongBytes("all differ")
        return simple(engine, *place)

    obtain(FakeBench(seconds), IDENTITY, ENGINES[:2], folder=tmp_path)
    bench = FakeBench()
    found = obtain(bench, IDENTITY, ENGINES, folder=tmp_path)
    assert {ask[0] for ask in bench.asked} == {"pack", "batch"}
    assert set(found.wrong) == set(obtain(_never, IDENTITY, ENGINES, folder=tmp_path).wrong) == {"zero"}


def test_where_every_engine_is_wrong_there_is_none() -> None:
    def seconds(*_: object) -> float:
        raise WrongBytes("all differ")

    with pytest.raises(DeviceError, match="no copy engine moves the right bytes here: pack: .*all differ; zero: "):
        obtain(FakeBench(seconds), IDENTITY, ENGINES, folder=None)


def test_a_bench_that_cannot_be_made_is_said_and_the_first_engine_serves(tmp_path: Path) -> None:
    def broken() -> FakeBench:
        raise ImportError("no triton")

    found = obtain(broken, IDENTITY, ENGINES, folder=tmp_path)
    assert found.source == "nothing was measured"
    assert found.choose("store", 256, 4096) == "pack"
    assert "pack failed at a store: ImportError: no triton" in found.notes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answer", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_a_failure(answer: float) -> None:
    found = calibrate(FakeBench(lambda *_: answer), [Point("load", 256, 16)], ["pack"], 100)
    assert found.seconds == {}
    assert "is no time" in found.notes[0]


def test_the_budget_ends_it_and_what_was_measured_stands() -> None:
    """0.3 s each, in 2 s: two points of three engines, and the third's first is begun no more."""
    clock = ManualClock()

    def seconds(*arguments: object) -> float:
        clock.advance(0.3)
        return simple(*arguments)

    bench = FakeBench(seconds)
    found = calibrate(bench, list(points()), ENGINES, 2.0, clock)
    assert list(found.seconds) == list(points())[:2]
    assert len(bench.asked) == 7
    assert "the budget of 2 s ended at zero for 4096 fragments of 4096 bytes (store): 2 of 26 points" in found.notes[0]
    assert bench.closed.wait(10)


def test_a_device_that_hangs_holds_nobody() -> None:
    release = threading.Event()

    def seconds(*arguments: object) -> float:
        if arguments[0] == "zero":
            release.wait(30)
        return simple(*arguments)

    bench = FakeBench(seconds)
    start = time.monotonic()
    found = calibrate(bench, list(points()), ENGINES, 1.0)  # time for the first, on a busy machine too
    assert time.monotonic() - start < 20
    assert found.seconds == {}
    assert "ended at zero" in found.notes[0]
    assert not bench.closed.is_set()
    release.set()  # it comes back after all: nothing more is asked, and its memory is given back
    assert bench.closed.wait(10)
    assert len(bench.asked) == 2


def test_what_the_budget_cut_off_may_be_given_time_to_end() -> None:
    """A kernel that is being compiled is kept for the next process only when that has ended."""
    release = threading.Event()

    def seconds(*arguments: object) -> float:
        release.wait(30)
        return 1.0

    bench = FakeBench(seconds)
    threading.Timer(1.0, release.set).start()
    found = calibrate(bench, list(points()), ENGINES, 0.1, linger_s=30)
    assert bench.closed.is_set()
    assert (found.seconds, len(bench.asked)) == ({}, 1)  # and nothing more is measured meanwhile
    release.clear()
    bench, start = FakeBench(seconds), time.monotonic()
    calibrate(bench, list(points()), ENGINES, 0.1, linger_s=0.2)
    assert time.monotonic() - start < 20 and not bench.closed.is_set()
    release.set()


def test_no_budget_measures_nothing() -> None:
    bench = FakeBench()
    assert calibrate(bench, list(points()), ENGINES, 0.0).seconds == {}
    assert (bench.made, bench.asked) == (0, [])


# ---- keeping


def _never() -> FakeBench:
    raise AssertionError("measured again")


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_what_was_measured_is_kept_for_the_next_process(tmp_path: Path) -> None:
    first = obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path / "a" / "b")
    again = obtain(_never, IDENTITY, ENGINES, folder=tmp_path / "a" / "b")
    assert (first.source, again.source) == ("measured", "kept")
    assert again.seconds == first.seconds
    assert again.file == first.file == only_file(tmp_path / "a" / "b")
    assert again.notes == ()
    assert os.stat(tmp_path / "a" / "b").st_mode & 0o077 == 0
    assert os.stat(only_file(tmp_path / "a" / "b")).st_mode & 0o077 == 0


@pytest.mark.parametrize("field", ["device", "uuid", "driver", "kvxfer", "triton"])
def test_another_device_or_version_is_measured_anew(tmp_path: Path, field: str) -> None:
    obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path)
    other = Identity(**{**{name: getattr(IDENTITY, name) for name in Identity.__slots__}, field: "other"})
    bench = FakeBench()
    assert obtain(bench, other, ENGINES, folder=tmp_path).source == "measured"
    assert len(bench.asked) == 78
    assert len(list(tmp_path.iterdir())) == 2


def test_what_the_budget_cut_off_is_measured_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    slow = FakeBench(lambda *a: clock.advance(2.0) or simple(*a))
    with monkeypatch.context() as patch:
        patch.setattr(calibration, "calibrate", functools.partial(calibrate, clock=clock))
        first = obtain(slow, IDENTITY, ENGINES, folder=tmp_path, budget_s=30.5)  # 15 answers, and one of the next point
    assert len(first.seconds) == 5
    bench = FakeBench()
    second = obtain(bench, IDENTITY, ENGINES, folder=tmp_path)
    assert (second.source, len(second.seconds)) == ("kept, the rest measured", 26)
    assert len(bench.asked) == 3 * (26 - len(first.seconds))
    assert obtain(_never, IDENTITY, ENGINES, folder=tmp_path).seconds == second.seconds


def test_an_engine_that_was_not_there_is_measured_when_it_is(tmp_path: Path) -> None:
    obtain(FakeBench(), IDENTITY, ENGINES[:2], folder=tmp_path)
    assert obtain(_never, IDENTITY, ("zero",), folder=tmp_path).choose("store", 256, 4096) == "zero"
    bench = FakeBench()
    assert obtain(bench, IDENTITY, ENGINES, folder=tmp_path).source == "measured"
    assert len(bench.asked) == 78


def damage(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        raw = json.loads(file.read_text())
        change(raw)
        file.write_text(json.dumps(raw))

    return apply


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text(file.read_text()[:-40]),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00" * 100),
    "a list": lambda file: file.write_text("[1, 2]"),
    "nested": lambda file: file.write_text("[" * 100_000),
    "huge": lambda file: file.write_text(file.read_text() + " " * (1 << 20)),
    "newer": damage(lambda raw: raw.update(format=2)),
    "foreign": damage(lambda raw: raw["identity"].update(uuid="GPU-2")),
    "no points": damage(lambda raw: raw.pop("points")),
    "direction": damage(lambda raw: raw["points"][0].update(direction="sideways")),
    "size": damage(lambda raw: raw["points"][0].update(fragment_bytes=-256)),
    "fragments": damage(lambda raw: raw["points"][0].update(fragments=1.5)),
    "engine": damage(lambda raw: raw["points"][0]["seconds"].update(magic=1e-9)),
    "negative": damage(lambda raw: raw["points"][0]["seconds"].update(pack=-1e-9)),
    "not a number": damage(lambda raw: raw["points"][0]["seconds"].update(pack=float("nan"))),
    "text": damage(lambda raw: raw["points"][0]["seconds"].update(pack="fast")),
    "wrong": damage(lambda raw: raw.update(wrong={"magic": "x"})),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_measured_anew_and_replaced(tmp_path: Path, kind: str) -> None:
    first = obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path)
    DAMAGE[kind](only_file(tmp_path))
    bench = FakeBench()
    again = obtain(bench, IDENTITY, ENGINES, folder=tmp_path)
    assert (again.source, again.seconds, len(bench.asked)) == ("measured", first.seconds, 78)
    assert f"{only_file(tmp_path)} is not used: " in again.notes[0]
    assert obtain(_never, IDENTITY, ENGINES, folder=tmp_path).source == "kept"


def test_where_nothing_can_be_kept_it_is_said_and_all_else_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path / "file" / "kvxfer")
    assert (found.source, len(found.seconds)) == ("measured", 26)
    assert "nothing is kept: " in found.notes[-1]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain(FakeBench(), IDENTITY, ENGINES[:1], folder=tmp_path)
    before = only_file(tmp_path).read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path).notes[-1]
    assert only_file(tmp_path).read_text() == before


def test_the_folder_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    obtain(FakeBench(), IDENTITY, ENGINES)
    assert only_file(tmp_path / "cache" / "kvxfer").name.startswith("copy-engines-")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = obtain(FakeBench(), IDENTITY, ENGINES)
    assert found.file == only_file(tmp_path / "home" / ".cache" / "kvxfer")


# ---- asking for one


@pytest.mark.parametrize(
    ("config", "variable", "asked"),
    [
        (None, None, ("auto", "auto")),
        ("zero", None, ("zero", "zero")),
        ({"load": "batch"}, None, ("auto", "batch")),
        ({"load": "batch", "store": "pack"}, None, ("pack", "batch")),
        ({}, None, ("auto", "auto")),
        ("zero", "pack", ("pack", "pack")),
        ({"load": "batch"}, "auto", ("auto", "auto")),
    ],
)
def test_what_is_asked_for(config: object, variable: str | None, asked: tuple[str, str]) -> None:
    environment = {} if variable is None else {calibration.VARIABLE: variable}
    assert wanted(config, environment) == dict(zip(DIRECTIONS, asked, strict=True))


@pytest.mark.parametrize(
    ("config", "variable", "words"),
    [
        ("fast", None, "copy_engine['store']='fast' must be one of pack, zero, batch, auto"),
        ({"load": "fast"}, None, "copy_engine['load']='fast'"),
        ({"load": 3}, None, "copy_engine['load']=3"),
        ({"loads": "zero"}, None, "unknown copy_engine keys ['loads']; known keys are ['load', 'store']"),
        (["zero"], None, "copy_engine=['zero']"),
        (None, "Zero", "KVXFER_COPY_ENGINE='Zero' must be one of pack, zero, batch, auto"),
        (None, "", "KVXFER_COPY_ENGINE=''"),
    ],
)
def test_what_cannot_be_asked_for(config: object, variable: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        wanted(config, {} if variable is None else {calibration.VARIABLE: variable})
    assert words in str(caught.value)


def test_an_engine_that_is_asked_for_is_taken_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = obtain(_never, IDENTITY, ENGINES, folder=tmp_path, config={"store": "batch", "load": "zero"})
    assert (found.source, found.choose("store", 1, 1), found.choose("load", 1, 1)) == ("given", "batch", "zero")
    monkeypatch.setenv(calibration.VARIABLE, "pack")
    assert obtain(_never, IDENTITY, ENGINES, folder=tmp_path, config="zero").choose("load", 1, 1) == "pack"


def test_only_the_direction_that_is_open_is_measured(tmp_path: Path) -> None:
    bench = FakeBench()
    found = obtain(bench, IDENTITY, ENGINES, folder=tmp_path, config={"store": "batch"})
    assert {direction for _, direction, _, _ in bench.asked} == {"load"}
    assert (found.source, found.choose("store", 256, 4096)) == ("measured", "batch")


def test_an_engine_that_is_asked_for_and_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'batch' was asked for loads and cannot be used here: pack, zero can"):
        obtain(_never, IDENTITY, ("zero", "pack"), folder=tmp_path, config={"load": "batch", "store": "pack"})


def test_it_can_be_shown(tmp_path: Path) -> None:
    found = obtain(FakeBench(), IDENTITY, ENGINES, folder=tmp_path)
    shown = json.loads(json.dumps(found.as_json()))
    assert set(shown) == {"engines", "wrong", "asked", "source", "notes", "file", "points"}
    assert len(shown["points"]) == 26
    for point in shown["points"]:
        place = (point["direction"], point["fragment_bytes"], point["fragments"])
        assert point["engine"] == found.choose(*place)
        assert point["seconds"] == {engine: simple(engine, *place) for engine in ENGINES}
