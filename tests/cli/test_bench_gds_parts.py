"""The bench's parts by themselves: content, what checks notice, which places are drawn, how requests are timed."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cli.bench_check import Made, OnlyRead
from kvxfer.cli.bench_content import PAGE, UNKNOWN, Content
from kvxfer.cli.bench_job import _Blocks, _split
from kvxfer.cli.bench_lanes import READ, WRITE, Burst, Lanes, empty_calls, percentiles
from kvxfer.cli.bench_memory import HostMemory
from kvxfer.cli.bench_plan import Plan, parse_size, parse_sizes
from kvxfer.errors import ConfigError, IOFault

K, M = 1 << 10, 1 << 20
MASK = 2**64 - 1


def splitmix(x: int) -> int:
    """By the book (Steele, Lea, Flood 2014), in Python's own numbers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def oracle(seed: int, file: int, page: int, version: int) -> bytes:
    """One page, word by word."""
    base = splitmix(seed)
    stamp = splitmix(splitmix((splitmix(base) + file) & MASK) ^ (page | version << 40))
    return b"".join((splitmix((base + word) & MASK) ^ stamp).to_bytes(8, "little") for word in range(1, PAGE // 8 + 1))


def pages(content: Content, *which: tuple[int, int, int]) -> Any:
    file, page, version = (np.array(each) for each in zip(*which, strict=True))
    stamps = content.stamps(file.astype(np.int64), page.astype(np.int64), version.astype(np.uint32))
    out = np.empty(len(which) * PAGE, dtype=np.uint8)
    content.fill(out, stamps)
    return out, stamps


@given(st.integers(0, MASK), st.integers(0, 2**24 - 1), st.integers(0, 2**40 - 1), st.integers(0, 2**24 - 1))
def test_content_is_what_it_is_said_to_be(seed: int, file: int, page: int, version: int) -> None:
    got, _ = pages(Content(seed), (file, page, version))
    assert got.tobytes() == oracle(seed, file, page, version)


def test_no_two_pages_are_alike_in_any_word() -> None:
    which = [(file, page, version) for file in range(3) for page in (0, 1, 2, 1 << 20) for version in range(3)]
    words = pages(Content(7), *which)[0].view(np.uint64).reshape(len(which), -1)
    other = pages(Content(8), *which)[0].view(np.uint64).reshape(len(which), -1)
    for column in (0, 1, 511):
        assert len({*words[:, column].tolist(), *other[:, column].tolist()}) == 2 * len(which)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_any_wrong_byte_is_found_where_it_is(count: int) -> None:
    content = Content(1)
    good, stamps = pages(content, *[(0, page, 0) for page in range(count)])
    assert content.wrong_pages(good, stamps).tolist() == []
    for page in {0, count // 2, count - 1}:
        for byte in (0, 77, PAGE - 1):
            bad = good.copy()
            bad[page * PAGE + byte] ^= 0x10
            bad[page * PAGE + PAGE - 1] ^= 0x01
            assert content.wrong_pages(bad, stamps).tolist() == [page]
            first, differ = content.first_wrong(bad[page * PAGE : (page + 1) * PAGE], stamps[page : page + 1])
            assert (first, differ) == (byte, 1 if byte == PAGE - 1 else 2)


class Files:
    """Files in memory, as a way opens them; what is in `lose` is a write that only says that it was made."""

    def __init__(self, nbytes: int, count: int = 1) -> None:
        self.bytes = np.zeros((count, nbytes), dtype=np.uint8)
        self.lose: set[int] = set()
        self.misplace: dict[int, int] = {}
        self.opened = [File(self, index) for index in range(count)]


class File:
    def __init__(self, files: Files, index: int) -> None:
        self.files, self.index = files, index

    def read(self, buf: Any, size: int, file_offset: int) -> int:
        buf[:size] = self.files.bytes[self.index, file_offset : file_offset + size]
        return size

    def write(self, buf: Any, size: int, file_offset: int) -> int:
        if file_offset not in self.files.lose:
            at = self.files.misplace.get(file_offset, file_offset)
            self.files.bytes[self.index, at : at + size] = buf[:size]
        return size

    def close(self) -> None:
        pass


def burst_of(requests: list[tuple[int, int, int]], size: int) -> Burst:
    op, file, offset = (np.array(each, dtype=np.int64) for each in zip(*requests, strict=True))
    return Burst(op.astype(np.uint8), file, offset, np.zeros(len(op), dtype=np.int64), size)


class Rig:
    """A checker over files in memory; bursts are made by hand, in order."""

    def __init__(self, nbytes: int = M, count: int = 2) -> None:
        self.files = Files(nbytes, count)
        self.memory = HostMemory(M, PAGE)
        self.checker = Made(Content(3), [nbytes] * count, "direct")
        self.checker.fill(self.files.opened, self.memory, 256 * K)

    def make(
        self, requests: list[tuple[int, int, int]], size: int = 64 * K, fail: tuple[int, ...] = ()
    ) -> tuple[Burst, list[str]]:
        burst = burst_of(requests, size)
        self.checker.prepare(burst, self.memory)
        for slot, (op, file, offset) in enumerate(requests):
            burst.latency_ns[slot] = 1
            place = self.memory.place(slot * size, size)
            if slot in fail:
                burst.failed[slot] = "EIO"
            else:
                (self.files.opened[file].read if op == READ else self.files.opened[file].write)(place, size, offset)
        self.checker.settle(burst)
        for slot, (op, file, offset) in enumerate(requests):
            if op == WRITE and slot not in fail:
                self.memory.poison(slot * size, size)
                self.files.opened[file].read(self.memory.place(slot * size, size), size, offset)
        return burst, self.checker.wrong(burst, self.memory, burst.done)


def test_files_are_filled_with_their_own_content() -> None:
    rig = Rig()
    for file, page in ((0, 0), (0, 255), (1, 0), (1, 200)):
        assert rig.files.bytes[file, page * PAGE : (page + 1) * PAGE].tobytes() == oracle(3, file, page, 0)


def test_what_was_written_has_the_next_version() -> None:
    rig = Rig()
    for version in (1, 2):
        _, wrong = rig.make([(WRITE, 1, 64 * K), (READ, 0, 0), (WRITE, 0, 128 * K)])
        assert wrong == []
        assert rig.files.bytes[1, 64 * K : 64 * K + PAGE].tobytes() == oracle(3, 1, 16, version)
    assert rig.files.bytes[0, :PAGE].tobytes() == oracle(3, 0, 0, 0)


def test_a_write_that_was_only_said_to_be_made_is_noticed() -> None:
    """On the drive is the same block's earlier content: right place, right file, wrong version."""
    rig = Rig()
    rig.make([(WRITE, 0, 64 * K)])
    rig.files.lose.add(64 * K)
    _, wrong = rig.make([(WRITE, 0, 64 * K), (WRITE, 0, 0)])
    assert [text.split(":")[0] for text in wrong] == ["file 0 offset 0x10000"]


def test_a_write_that_went_to_another_place_is_noticed_in_both() -> None:
    rig = Rig()
    rig.files.misplace[64 * K] = 192 * K
    _, wrong = rig.make([(WRITE, 0, 64 * K)])
    assert len(wrong) == 1
    _, wrong = rig.make([(READ, 0, 192 * K), (READ, 0, 128 * K)])
    assert [text.split(":")[0] for text in wrong] == ["file 0 offset 0x30000"]


def test_a_read_that_brought_nothing_is_noticed() -> None:
    """Its slot holds what the same request brought a burst ago."""
    rig = Rig()
    rig.make([(READ, 0, 0), (READ, 0, 64 * K)])
    rig.files.opened[0].read = lambda buf, size, file_offset: size  # type: ignore[method-assign]
    _, wrong = rig.make([(READ, 0, 0), (READ, 0, 64 * K)])
    assert len(wrong) == 2


def test_files_that_are_swapped_are_noticed() -> None:
    rig = Rig()
    rig.files.bytes[[0, 1]] = rig.files.bytes[[1, 0]]
    assert len(rig.make([(READ, 0, 0), (READ, 1, 0)])[1]) == 2


def test_what_a_failed_write_left_is_not_read_until_it_is_written_again() -> None:
    rig = Rig()
    rig.make([(WRITE, 0, 64 * K)])
    burst, wrong = rig.make([(WRITE, 0, 64 * K), (READ, 0, 0)], fail=(0,))
    assert (wrong, burst.done.tolist()) == ([], [False, True])
    places = np.array([0, 0, 0]), np.array([0, 64 * K, 128 * K])
    assert rig.checker.readable(*places, 64 * K).tolist() == [True, False, True]
    assert rig.checker.readable(*places, 128 * K).tolist() == [False, False, True]
    _, wrong = rig.make([(WRITE, 0, 64 * K)])
    assert wrong == []
    assert rig.checker.readable(*places, 64 * K).all()
    assert rig.checker._versions[0][16] not in (0, 1, UNKNOWN)


def test_a_first_reading_is_what_given_files_are_held_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = np.random.default_rng(1).integers(256, size=256 * K + 5, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    checker = OnlyRead([path], [256 * K])
    memory = HostMemory(M, PAGE)
    for size in (64 * K, 128 * K):
        checker.begin(size)
        burst = burst_of([(READ, 0, offset) for offset in range(0, 256 * K, size)], size)
        burst.latency_ns[:] = 1
        memory.place(0, 256 * K)[:] = data[: 256 * K]
        assert checker.wrong(burst, memory, burst.done) == []
        memory.place(0, 256 * K)[size + 1] ^= 1
        (text,) = checker.wrong(burst, memory, burst.done)
        assert text.startswith(f"file offset {size:#x}:")
    path.write_bytes(b"short")
    with pytest.raises(IOFault, match="it is being cut"):
        checker.begin(64 * K)


def test_a_write_that_was_not_begun_changes_nothing() -> None:
    rig = Rig()
    burst = burst_of([(WRITE, 0, 0), (WRITE, 0, 64 * K)], 64 * K)
    rig.checker.prepare(burst, rig.memory)
    burst.latency_ns[0] = 1
    rig.files.opened[0].write(rig.memory.place(0, 64 * K), 64 * K, 0)
    rig.checker.settle(burst)
    assert rig.make([(READ, 0, 0), (READ, 0, 64 * K)])[1] == []
    assert rig.checker._versions[0][[0, 15, 16, 31]].tolist() == [1, 1, 0, 0]


# ---- places


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5]),
)
def test_every_place_belongs_to_one_thread(file_pages: list[int], threads: int, per_request: int) -> None:
    size = per_request * PAGE
    parts = _split([count * PAGE for count in file_pages], threads, size)
    assert len(parts) == threads
    seen = [place for files, offsets in parts for place in zip(files.tolist(), offsets.tolist(), strict=True)]
    want = [(file, block * size) for file, count in enumerate(file_pages) for block in range(count // per_request)]
    assert sorted(seen) == want


@pytest.mark.parametrize("layout", ["sequential", "random"])
def test_a_burst_goes_to_as_many_different_places(layout: str) -> None:
    plan = Plan(targets=(), layout=layout, threads=2, depth=2, span_bytes=64 * M, sizes=(64 * K,))
    blocks = _Blocks([4 * M, 4 * M], plan, 64 * K, np.random.default_rng(1))
    checker = Rig(4 * M).checker
    bursts = [blocks.draw(32, checker) for _ in range(5)]
    for burst in bursts:
        places = list(zip(burst.file.tolist(), burst.offset.tolist(), strict=True))
        assert len(set(places)) == len(places) == 32
        assert (burst.op == READ).all()
        assert (burst.thread == burst.file).all()
        assert (burst.offset % (64 * K) == 0).all() and burst.offset.max() < 4 * M
    firsts = [burst.offset[:16].tolist() for burst in bursts]
    if layout == "sequential":
        assert firsts[0] == [block * 64 * K for block in range(16)]
        assert firsts[3] == [block * 64 * K for block in range(48, 64)]
        assert firsts[4] == firsts[0]
    else:
        assert sorted(firsts[0]) != firsts[0] != firsts[1]


# ---- lanes


def test_a_lane_has_one_request_and_all_lanes_are_used() -> None:
    now: dict[str, int] = {}
    most, lock = [0], threading.Lock()
    meet = threading.Barrier(
        6, timeout=20
    )  # each lane's first request: however slow the machine, all are there at once

    def move(op: int, file: int, offset: int, slot: int, nbytes: int) -> int:
        name = threading.current_thread().name
        with lock:
            first = name not in now
            now[name] = now.get(name, 0) + 1
            most[0] = max(most[0], sum(now.values()))
            assert now[name] == 1
        if first:
            meet.wait()
        time.sleep(0.005)
        with lock:
            now[name] -= 1
        return nbytes

    lanes = Lanes(2, 3, move)
    burst = burst_of([(READ, 0, 0)] * 40, 4096)
    burst.thread[:] = np.arange(40) % 2
    lanes.run(burst)
    lanes.close()
    assert (most[0], len(now)) == (6, 6)
    assert burst.done.all()
    assert 40 / 6 * 0.005 <= burst.wall_s < burst.latency_ns.sum() / 1e9
    assert (burst.latency_ns >= 5_000_000).all()


def test_a_burst_lasts_from_its_first_start_to_its_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = iter([(1_000_000_000, 1_200_000_000), None, (1_150_000_000, 1_400_000_000), (1_100_000_000, 1_300_000_000)])
    monkeypatch.setattr(Lanes, "_draw", lambda *_: next(spans))
    lanes = Lanes(1, 4, lambda *_: 0)
    assert lanes.run(burst_of([(READ, 0, 0)] * 4, 4096)).wall_s == pytest.approx(0.4)
    lanes.close()


def test_no_request_begins_when_the_time_is_up_and_nobodys_is_made() -> None:
    lanes = Lanes(1, 2, lambda op, file, offset, slot, nbytes: time.sleep(0.05) or nbytes)
    burst = burst_of([(READ, 0, 0)] * 1000, 4096)
    burst.thread[:3] = -1
    lanes.run(burst, 0.5)
    assert 0 < burst.made.sum() <= 24
    assert not burst.made[:3].any()
    again = lanes.run(burst_of([(READ, 0, 0)] * 4, 4096))
    assert again.done.all()
    lanes.close()


def test_what_went_wrong_has_a_name_and_a_defect_is_raised() -> None:
    def move(op: int, file: int, offset: int, slot: int, nbytes: int) -> int:
        if slot == 1:
            raise IOFault(errno.EIO, "no")
        if slot == 2:
            raise ConfigError("never")
        return nbytes - (slot == 3)

    lanes = Lanes(1, 2, move)
    burst = lanes.run(burst_of([(READ, 0, 0)] * 5, 4096))
    assert burst.failed == {1: "EIO", 2: "ConfigError", 3: "short"}
    assert (burst.made.tolist(), burst.done.tolist()) == ([True] * 5, [True, False, False, False, True])
    lanes.close()
    lanes = Lanes(1, 2, lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        lanes.run(burst_of([(READ, 0, 0)] * 5, 4096))
    lanes.close()


def test_lanes_leave_no_thread() -> None:
    before = set(threading.enumerate())  # of which some, other tests' own, may end meanwhile
    assert empty_calls(2, 2, lambda op, file, offset, slot, nbytes: 0) > 1000
    assert set(threading.enumerate()) <= before


def test_percentiles_of_few_are_none() -> None:
    thousand = percentiles(np.arange(1, 1001) * 1000)
    assert thousand == pytest.approx({"p50": 500.5, "p90": 900.1, "p99": 990.01, "p99_9": 999.001, "max": 1000.0})
    assert percentiles(np.arange(1, 100))["p99"] is None
    assert percentiles(np.arange(1, 1000))["p99_9"] is None
    assert percentiles([7000]) == {"p50": 7.0, "p90": None, "p99": None, "p99_9": None, "max": 7.0}
    assert set(percentiles([]).values()) == {None}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("64k", 65536),
        ("64KiB", 65536),
        ("2 MiB", 2 * M),
        ("1g", 1 << 30),
        ("512B", 512),
    ],
)
def test_sizes_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert parse_sizes(f"{text},4K") == (nbytes, 4096)


@given(st.text("0123456789 KkMGTiBb.-x", max_size=6))
def test_any_other_text_is_refused_by_name(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ConfigError as exc:
        said = str(exc)
        assert repr(text) in said
