"""The copy loops on mappings that no layout of ours would make, against a loop over bytes; and what a mapping refuses.

The suite over every converter (tests/convert) covers the mappings that kvxfer makes. Here fragments have any size and
stride, and each instruction set, the lockstep and the streaming stores get their turn.
"""

from __future__ import annotations

import ctypes as C
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native
from kvxfer.checksum import segment_checksum
from kvxfer.mapping import RUN_DTYPE
from kvxfer.slot import SlotLayout, round_up

ROOT = Path(__file__).resolve().parents[2]
POISON = 0xA5
NUM_BLOCKS = 6
FRAGMENTS = [1, 3, 4, 16, 33, 52, 63, 64, 72, 128, 160, 192, 256, 512, 1000, 4096, 5000]


@dataclass
class Case:
    """Runs over tensors, and a slot of which they are the segments `segments`."""

    slot: SlotLayout
    runs: np.ndarray
    segments: list[int]
    canonical_block_stride: int
    block_stride: list[int]  # of each tensor

    def tensors(self, num_blocks: int, seed: int | None) -> list[np.ndarray]:
        """Cache-line aligned tensors, of random bytes or of POISON."""
        rng = None if seed is None else np.random.default_rng(seed)
        found = []
        for stride in self.block_stride:
            raw = np.full(num_blocks * stride + 64, POISON, dtype=np.uint8)
            tensor = raw[-raw.ctypes.data % 64 :][: num_blocks * stride]
            if rng is not None:
                tensor[:] = rng.integers(0, 256, tensor.size, dtype=np.uint8)
            found.append(tensor)
        return found

    def handle(self, tensors: list[np.ndarray], num_blocks: int) -> C.c_void_p:
        handle = C.c_void_p()
        pairs = zip(tensors, self.block_stride, strict=True)
        structs = (_native.Tensor * len(tensors))(*(_native.Tensor(t.ctypes.data, s, num_blocks) for t, s in pairs))
        answer = _native.lib().kvx_mapping_new(
            C.byref(_native.SlotLayoutStruct.of(self.slot)), self.runs.ctypes.data, len(self.runs),
            (C.c_uint32 * len(self.segments))(*self.segments), len(self.segments), self.canonical_block_stride,
            structs, len(tensors), 1, C.byref(handle),
        )  # fmt: skip
        if answer:
            raise OSError(-answer, "kvx_mapping_new")
        return handle

    def places(self, ids: np.ndarray) -> Iterator[tuple[int, int, int, int, int]]:
        """(canonical offset, tensor, its offset or -1, bytes, segment) of every fragment of one chunk."""
        for run in self.runs:
            tensor, segment, local, canonical, size, count, stride = map(int, run.item())
            for i, block in enumerate(ids):
                for f in range(count):
                    start = canonical + i * self.canonical_block_stride + f * size
                    at = -1 if block < 0 else int(block) * self.block_stride[tensor] + local + f * stride
                    yield segment * self.slot.segment_stride + start, tensor, at, size, segment


def random_case(seed: int) -> Case:
    """A tiling: runs one after the other for all blocks, or blocks one after the other for all runs."""
    rng = np.random.default_rng(seed)
    blocks, planes, heads = int(rng.choice([1, 1, 2, 3, 16])), int(rng.integers(1, 4)), int(rng.integers(1, 11))
    whole_runs_first = bool(rng.integers(2))
    grain = int(rng.choice([1, 4, 16, 64]))  # of sizes and strides
    runs, strides = [], []
    if whole_runs_first:
        size = round_up(int(rng.choice(FRAGMENTS)), grain)
        sizes, count = [size] * planes, int(rng.choice([1, 1, 5, 16]))
        block_bytes = size * count
        starts = [plane * blocks * block_bytes for plane in range(planes)]
        segment_bytes = planes * blocks * block_bytes
    else:
        sizes = [round_up(int(size), grain) for size in rng.choice(FRAGMENTS, planes)]
        count = int(rng.choice([1, 1, 3]))
        starts = [count * sum(sizes[:plane]) for plane in range(planes)]
        block_bytes = count * sum(sizes)
        segment_bytes = blocks * block_bytes
    # A plane is a tensor, in which heads interleave (NHD), or lie one after the other (HND), or apart.
    way = rng.choice(["nhd", "hnd", "apart"])
    segments = sorted(rng.permutation(heads + 3)[:heads].tolist())
    gap = 0 if way != "apart" else round_up(int(rng.integers(1, 40)), grain)
    offset = int(rng.choice([0, 64, 7])) if grain == 1 else 64
    for plane in range(planes):
        strides.append(round_up(offset + heads * count * (sizes[plane] + gap), grain) + int(rng.choice([0, 64])))
        for head, segment in enumerate(segments):
            size = sizes[plane]
            stride = heads * size if way == "nhd" else size + gap
            local = offset + head * (size if way == "nhd" else count * (size + gap))
            runs.append((plane, segment, local, starts[plane], size, count, stride))
    runs.sort(key=lambda run: (run[1], run[3]))
    slot = SlotLayout(
        segment_bytes=segment_bytes, last_segment_bytes=segment_bytes, num_segments=heads + 3,
        segments_per_trailer=1, blocks_per_chunk=blocks,
    )  # fmt: skip
    return Case(slot, np.array(runs, dtype=RUN_DTYPE), segments, block_bytes, strides)


def check(seed: int, *, num_chunks: int = 3, threads: int = 1) -> None:
    """Gather and scatter of a random case, every byte compared."""
    case, rng, lib = random_case(seed), np.random.default_rng(seed + 1), _native.lib()
    blocks, slot = case.slot.blocks_per_chunk, case.slot
    num_blocks = max(NUM_BLOCKS, num_chunks * blocks)
    ids = rng.permutation(num_blocks)[: num_chunks * blocks].astype(np.int64).reshape(num_chunks, blocks)
    if num_chunks > 1:
        ids[rng.random(ids.shape) < 0.1] = -1
    tensors = case.tensors(num_blocks, seed)
    raw = np.full(num_chunks * slot.payload_stride + 64 + seed % 2, POISON, dtype=np.uint8)
    skip = (-raw.ctypes.data % 64) + seed % 2  # aligned, or by one byte not
    out = raw[skip : skip + num_chunks * slot.payload_stride].reshape(num_chunks, -1)

    want = np.full_like(out, POISON)
    for chunk, row in enumerate(ids):
        for segment in case.segments:
            want[chunk, segment * slot.segment_stride : (segment + 1) * slot.segment_stride] = 0
        for start, tensor, at, size, _ in case.places(row):
            if at >= 0:
                want[chunk, start : start + size] = tensors[tensor][at : at + size]
    cuts = [(s, slice(s * slot.segment_stride, s * slot.segment_stride + slot.segment_bytes)) for s in case.segments]
    want_sums = np.full((num_chunks, slot.num_segments), 0xDEAD, dtype=np.uint64)
    for chunk in range(num_chunks):
        for segment, cut in cuts:
            want_sums[chunk, segment] = segment_checksum(want[chunk, cut])

    handle = case.handle(tensors, num_blocks)
    for with_sums in (True, False):
        out[:] = POISON
        sums = np.full_like(want_sums, 0xDEAD)
        assert lib.kvx_gather(
            handle, ids.ctypes.data, num_chunks, out.ctypes.data, slot.payload_stride,
            sums.ctypes.data if with_sums else None, threads,
        ) == 0  # fmt: skip
        assert np.array_equal(out, want), (seed, np.argwhere(out != want)[0])
        assert not with_sums or np.array_equal(sums, want_sums), seed
    lib.kvx_mapping_release(handle)

    # Absent blocks hold bytes here, which count in the sums and go nowhere.
    full = rng.integers(0, 256, out.shape, dtype=np.uint8)
    out[:] = full
    want_pages = case.tensors(num_blocks, None)
    for chunk, row in enumerate(ids):
        for start, tensor, at, size, _ in case.places(row):
            if at >= 0:
                want_pages[tensor][at : at + size] = full[chunk, start : start + size]
    for with_sums in (True, False):
        pages = case.tensors(num_blocks, None)
        handle = case.handle(pages, num_blocks)
        sums = np.full_like(want_sums, 0xDEAD)
        assert lib.kvx_scatter(
            handle, ids.ctypes.data, num_chunks, out.ctypes.data, slot.payload_stride,
            sums.ctypes.data if with_sums else None, threads,
        ) == 0  # fmt: skip
        for page, wanted in zip(pages, want_pages, strict=True):
            assert np.array_equal(page, wanted), (seed, np.argwhere(page != wanted)[0])
        if with_sums:
            for chunk in range(num_chunks):
                for segment, cut in cuts:
                    assert int(sums[chunk, segment]) == segment_checksum(full[chunk, cut]), (seed, chunk, segment)
        lib.kvx_mapping_release(handle)
    assert np.array_equal(out, full)


@pytest.mark.parametrize("seed", range(80))
def test_any_tiling(seed: int) -> None:
    check(seed, threads=1 + seed % 3)


def streaming_seeds(count: int) -> list[tuple[int, int]]:
    """Cases, and the number of chunks that takes them over the size from which stores go around the caches."""
    found: list[tuple[int, int]] = []
    for seed in range(1000, 3000):
        if len(found) == count:
            break
        case = random_case(seed)
        part = len(case.segments) * case.slot.segment_bytes
        if case.slot.segment_bytes > 20_000 and part * 40 > (16 << 20) and len(case.runs) * part < 30 << 20:
            found.append((seed, -(-(17 << 20) // part)))
    return found


@pytest.mark.parametrize(("seed", "num_chunks"), streaming_seeds(12))
def test_any_tiling_with_streaming_stores(seed: int, num_chunks: int) -> None:
    check(seed, num_chunks=num_chunks, threads=2)


@pytest.mark.parametrize(("step", "streaming"), [(8, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("most", ["scalar", "avx2"])
def test_any_tiling_with_older_instructions(most: str, step: int, streaming: int) -> None:
    """KVXFER_ISA is read once, hence a process of its own."""
    code = (
        "from tests.native.test_copy_runs import check, streaming_seeds\n"
        f"for seed in range(0, 80, {step}): check(seed)\n"
        f"for seed, chunks in streaming_seeds({streaming}): check(seed, num_chunks=chunks)\n"
    )
    environment = {**os.environ, "KVXFER_ISA": most}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- refusals ---------------------------------------------------------------------------------------------


def small_case() -> Case:
    """Two segments of two runs, two blocks a chunk."""
    runs = [(0, s, s * 200 + r * 100, r * 200, 100, 1, 100) for s in (0, 1) for r in (0, 1)]
    slot = SlotLayout(
        segment_bytes=400, last_segment_bytes=400, num_segments=2, segments_per_trailer=1, blocks_per_chunk=2
    )
    return Case(slot, np.array(runs, dtype=RUN_DTYPE), [0, 1], 100, [400])


def made(case: Case, num_blocks: int = NUM_BLOCKS) -> int:
    """0, or the errno with which the mapping is refused."""
    try:
        _native.lib().kvx_mapping_release(case.handle(case.tensors(num_blocks, None), num_blocks))
    except OSError as refusal:
        return refusal.errno or -1
    return 0


def test_the_small_case_is_good() -> None:
    assert made(small_case()) == 0


HUGE = 2**64 - 1
BAD_RUNS = {
    "tensor beyond the list": (0, "tensor", 1),
    "segment that is not listed": (3, "segment", 2),
    "segments out of order": (0, "segment", 1),
    "no bytes": (0, "fragment_size", 0),
    "no fragments": (0, "num_fragments", 0),
    "a hole": (0, "fragment_size", 99),
    "an overlap": (0, "fragment_size", 101),
    "a run twice": (1, "canonical_offset", 0),
    "beyond the segment": (1, "canonical_offset", 300),
    "a canonical offset that wraps": (1, "canonical_offset", HUGE - 99),
    "a size that wraps": (0, "fragment_size", HUGE),
    "a number that wraps": (0, "num_fragments", 2**62),
    "a local offset that wraps": (0, "local_offset", HUGE - 10),
}


@pytest.mark.parametrize(("run", "name", "value"), BAD_RUNS.values(), ids=BAD_RUNS)
def test_runs_that_leave_their_bounds_are_refused(run: int, name: str, value: int) -> None:
    case = small_case()
    case.runs[run][name] = value
    assert made(case) == errno.EINVAL


def test_a_stride_that_wraps_is_refused() -> None:
    case = small_case()
    case.runs["fragment_size"], case.runs["num_fragments"] = 50, 2
    case.runs["local_stride"] = 50
    assert made(case) == 0
    case.runs["local_stride"] = HUGE - 5
    assert made(case) == errno.EINVAL


@pytest.mark.parametrize("segments", [[], [0], [1], [1, 0], [0, 0], [0, 2], [0, 1, 2]])
def test_segments_must_be_those_of_the_runs_ascending(segments: list[int]) -> None:
    case = small_case()
    case.segments = segments
    assert made(case) == errno.EINVAL


@pytest.mark.parametrize("stride", [0, 99, 101, 2**63])
def test_a_block_stride_that_does_not_tile_is_refused(stride: int) -> None:
    case = small_case()
    case.canonical_block_stride = stride
    assert made(case) == errno.EINVAL


@pytest.mark.parametrize("ids", [[[0, NUM_BLOCKS]], [[-2, 0]], [[0, 2**62]], [[0, 1], [-(2**63), 0]]])
def test_block_ids_out_of_range_are_refused_before_anything_is_written(ids: list[list[int]]) -> None:
    case, array, lib = small_case(), np.array(ids, dtype=np.int64), _native.lib()
    tensors = case.tensors(NUM_BLOCKS, None)
    handle = case.handle(tensors, NUM_BLOCKS)
    out = np.zeros((len(ids), case.slot.payload_stride), dtype=np.uint8)
    where = (array.ctypes.data, len(ids), out.ctypes.data, case.slot.payload_stride, None, 1)
    assert lib.kvx_gather(handle, *where) == lib.kvx_scatter(handle, *where) == -errno.EINVAL
    assert not out.any()
    assert all((tensor == POISON).all() for tensor in tensors)
    lib.kvx_mapping_release(handle)


def test_chunks_that_would_overlap_are_refused() -> None:
    case, lib = small_case(), _native.lib()
    handle = case.handle(case.tensors(NUM_BLOCKS, None), NUM_BLOCKS)
    ids = np.zeros((2, 2), dtype=np.int64)
    out = np.zeros((2, case.slot.payload_stride), dtype=np.uint8)
    for stride in (0, 8191, 2**63):
        assert lib.kvx_gather(handle, ids.ctypes.data, 2, out.ctypes.data, stride, None, 1) == -errno.EINVAL
    assert lib.kvx_gather(handle, ids.ctypes.data, 0, out.ctypes.data, 0, None, 1) == 0
    assert lib.kvx_gather(None, ids.ctypes.data, 1, out.ctypes.data, 8192, None, 1) == -errno.EINVAL
    lib.kvx_mapping_release(handle)
    lib.kvx_mapping_release(None)
