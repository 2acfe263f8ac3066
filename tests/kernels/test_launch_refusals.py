"""launch.py: what it refuses, that tables are made once, and that what is compiled offline is what is launched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages
from kvxfer.errors import DeviceError, LayoutError
from kvxfer.geometry import KVGeometry
from kvxfer.layout import PageLayout, row_mapping
from tests.convert.common import NUM_BLOCKS, rank_pages
from tests.kernels.launch_rig import IDS, MODEL, STRIDE, aligned, interpreted, one_page, recorder
from tests.kernels.recorder import Recorder, record

__all__ = ["recorder"]

pytestmark = interpreted


@pytest.fixture
def pages() -> KVPages:
    return rank_pages(MODEL, "nhd", blocks_per_chunk=2, only=[])


# ---- what is refused

GOOD: dict[str, Any] = {"block_ids": IDS, "stage": torch.zeros((3, STRIDE), dtype=torch.uint8), "sums": None}
INT64, U8, ELSEWHERE = torch.int64, torch.uint8, torch.device("meta")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "ids of int32": ({"block_ids": IDS.to(torch.int32)}, "must be a torch tensor of torch.int64, not torch.i"),
    "ids of numpy": ({"block_ids": IDS.numpy()}, "block_ids must be a torch tensor of torch.int64, not ndarray"),
    "one id a chunk": ({"block_ids": IDS.reshape(-1, 1)}, r"block_ids has shape \(6, 1\), want \(6, 2\)"),
    "ids transposed": ({"block_ids": torch.zeros((2, 3), dtype=INT64).T}, "block_ids must be contiguous"),
    "ids elsewhere": ({"block_ids": IDS.to(ELSEWHERE)}, "block_ids is on meta: want cpu, or pinned host memory"),
    "fewer ids": ({"block_ids": IDS[:2]}, r"the canonical buffer has shape \(3, 16384\), want \(2, 16384\)"),
    "a short buffer": ({"stage": torch.zeros((3, STRIDE - 1), dtype=U8)}, r"want \(3, 16384\)"),
    "a flat buffer": ({"stage": torch.zeros(3 * STRIDE, dtype=U8)}, r"want \(.*, 16384\)"),
    "a buffer of int8": ({"stage": torch.zeros((3, STRIDE), dtype=torch.int8)}, "of torch.uint8, not torch.int8"),
    "a buffer of numpy": ({"stage": np.zeros((3, STRIDE), np.uint8)}, "of torch.uint8, not ndarray"),
    "a buffer elsewhere": ({"stage": torch.zeros((3, STRIDE), dtype=U8, device=ELSEWHERE)}, "is on meta: want cpu"),
    "every other byte": ({"stage": torch.zeros((3, 2 * STRIDE), dtype=U8)[:, ::2]}, "side by side"),
    "overlapping": ({"stage": torch.zeros(2 * STRIDE, dtype=U8).as_strided((3, STRIDE), (8, 1))}, "not overlapping"),
    "sums of float64": ({"sums": torch.zeros((3, 4), dtype=torch.float64)}, "torch.int64 or torch.uint64, not"),
    "sums of another slot": ({"sums": torch.zeros((3, 5), dtype=INT64)}, r"sums has shape \(3, 5\), want \(3, 4\)"),
    "sums transposed": ({"sums": torch.zeros((4, 3), dtype=INT64).T}, "sums must be contiguous"),
    "sums elsewhere": ({"sums": torch.zeros((3, 4), dtype=INT64, device=ELSEWHERE)}, "sums is on meta"),
    "no programs": ({"programs": 0}, "programs=0 must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), BAD.values(), ids=BAD)
def test_arguments_that_do_not_fit(recorder: Recorder, pages: KVPages, wrong: dict[str, Any], message: str) -> None:
    given = GOOD | wrong
    options = {"programs": given.pop("programs", None)}
    with pytest.raises(LayoutError, match=message):
        launch.gather(pages, given["block_ids"], pages.mapping, given["stage"], given["sums"], **options)
    with pytest.raises(LayoutError, match=message):
        launch.scatter(given["stage"], given["block_ids"], pages.mapping, pages, given["sums"], **options)
    if "block_ids" not in wrong:
        sums = torch.zeros((3, 4), dtype=torch.int64) if given["sums"] is None else given["sums"]
        with pytest.raises(LayoutError, match=message):
            launch.checksum(given["stage"], pages.mapping, sums, **options)
    assert recorder.launches == []


def test_what_fits_is_launched(recorder: Recorder, pages: KVPages) -> None:
    """The other side of the test above: nothing there is refused for another reason."""
    launch.gather(pages, GOOD["block_ids"], pages.mapping, GOOD["stage"], torch.zeros((3, 4), dtype=torch.uint64))
    launch.scatter(GOOD["stage"], GOOD["block_ids"], pages.mapping, pages)
    launch.checksum(GOOD["stage"], pages.mapping, torch.zeros((3, 4), dtype=torch.int64), programs=1)
    names = [each.kernel for each in recorder.launches]
    assert names == ["clear_sums", "move_planes", "move_planes", "clear_sums", "sum_segments"]


def test_no_chunks_need_no_launch(recorder: Recorder, pages: KVPages) -> None:
    stage, sums = torch.zeros((0, STRIDE), dtype=torch.uint8), torch.zeros((0, 4), dtype=torch.int64)
    launch.gather(pages, IDS[:0], pages.mapping, stage, sums)
    launch.scatter(stage, IDS[:0], pages.mapping, pages, sums)
    launch.checksum(stage, pages.mapping, sums)
    assert recorder.launches == []


def test_read_only_pages_can_be_gathered_and_not_written(recorder: Recorder) -> None:
    rows = np.zeros(16, np.uint8)
    rows.flags.writeable = False
    mapping = row_mapping(8)
    pages = KVPages(mapping, [rows], 2)
    stage, ids = torch.zeros((1, 4096), dtype=torch.uint8), torch.tensor([[0]])
    with pytest.raises(LayoutError, match="read-only"):
        launch.scatter(stage, ids, mapping, pages)
    assert recorder.launches == []
    launch.gather(pages, ids, mapping, stage)
    assert len(recorder.launches) == 1


def test_a_mapping_of_other_pages(recorder: Recorder, pages: KVPages) -> None:
    other = rank_pages(MODEL, "nhd", blocks_per_chunk=2, padding=8).mapping
    calls: tuple[Callable[[], Any], ...] = (
        lambda: launch.gather(pages, IDS, other, GOOD["stage"]),
        lambda: launch.scatter(GOOD["stage"], IDS, other, pages),
        lambda: launch.prepare(pages, other),
    )
    for call in calls:
        with pytest.raises(LayoutError, match="another layout"):
            call()
    assert recorder.launches == []


def test_pages_in_host_memory_need_the_interpreter(
    recorder: Recorder, pages: KVPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(LayoutError, match="in host memory, where only Triton's interpreter works"):
        launch.gather(pages, IDS, pages.mapping, GOOD["stage"])
    with pytest.raises(LayoutError, match="in host memory"):
        launch.prepare(pages, pages.mapping)
    assert recorder.launches == []


def test_host_memory_beside_a_device_must_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.raises(LayoutError, match="sums is on cpu: want cuda:0, or pinned host memory"):
        launch._check_tensor("sums", here, "cuda:0", (torch.int64,), (1, 4))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)
    launch._check_tensor("sums", here, "cuda:0", (torch.int64,), (1, 4))
    with pytest.raises(LayoutError, match="sums is on meta: want cuda:0"):
        launch._check_tensor("sums", here.to("meta"), "cuda:0", (torch.int64,), (1, 4))


def test_ids_are_checked_on_the_host(pages: KVPages) -> None:
    launch.check_block_ids(pages, pages.mapping, IDS.numpy())
    launch.check_distinct(IDS.numpy())
    for value in (NUM_BLOCKS, -2, 2**32):
        ids = IDS.numpy().copy()
        ids[1, 0] = value
        with pytest.raises(LayoutError, match=rf"block_ids\[1, 0\]={value}"):
            launch.check_block_ids(pages, pages.mapping, ids)
    with pytest.raises(LayoutError, match="block_ids has shape"):
        launch.check_block_ids(pages, pages.mapping, IDS.numpy().reshape(-1, 1))
    with pytest.raises(LayoutError, match="block 3 is named twice"):
        launch.check_distinct(np.array([[3, -1], [-1, 3]]))


# ---- tables are made once


def test_a_call_makes_and_uploads_nothing_that_is_there(
    recorder: Recorder, pages: KVPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.prepare(pages, pages.mapping)

    def refuse(*_: Any) -> Any:
        raise AssertionError("made again")

    monkeypatch.setattr(launch, "_upload", refuse)
    sums = torch.zeros((3, 4), dtype=torch.int64)
    for _ in range(2):
        launch.gather(pages, IDS, pages.mapping, GOOD["stage"], sums)
        launch.scatter(GOOD["stage"], IDS, pages.mapping, pages, sums)
        launch.checksum(GOOD["stage"], pages.mapping, sums)
    found = [each.arguments["places"].data_ptr() for each in recorder.launches]
    assert len(set(found)) == 1


def test_each_mapping_has_tables_of_its_own(recorder: Recorder, pages: KVPages) -> None:
    other = rank_pages(MODEL, "nhd", blocks_per_chunk=1).mapping
    launch.gather(pages, IDS, pages.mapping, GOOD["stage"])
    launch.gather(pages, IDS.reshape(-1, 1), other, torch.zeros((6, STRIDE), dtype=torch.uint8))
    assert [each.arguments["BLOCKS"] for each in recorder.launches] == [2, 1]
    assert len(pages.plans) == 2
    kept = weakref.ref(other)
    del other
    gc.collect()
    assert kept() is not None  # or another mapping could get its id, and with it its tables


def test_tables_go_with_their_pages_and_mapping() -> None:
    mapping = row_mapping(64)
    sums = torch.zeros((1, 1), dtype=torch.int64)
    launch.checksum(torch.zeros((1, 4096), dtype=torch.uint8), mapping, sums)
    pages = KVPages(mapping, [np.zeros(64, np.uint8)], 1)
    launch.prepare(pages, mapping)
    gone: list[Any] = [
        weakref.ref(mapping),
        weakref.ref(pages),
        weakref.ref(launch._sums_by_mapping[mapping]["cpu"].places),
    ]
    del mapping, pages
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_a_capture_that_would_hold_an_upload_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(DeviceError, match=r"call prepare\(pages, mapping\) before the capture"):
        launch._upload(np.zeros(3, np.int64), "cuda:0")


# ---- what is compiled offline is what is launched


def test_variants_are_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {each.name: each for each in launch.variants()}
    assert len(known) == len(list(launch.variants()))
    recorder = record(monkeypatch)
    geometry = KVGeometry(num_layers=2, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16)
    pages = one_page(geometry, PageLayout.nhd(geometry, 8))
    stage = torch.from_numpy(aligned(pages.mapping.slot.payload_stride)).view(1, -1)
    sums, ids = torch.zeros((1, 8), dtype=torch.int64), torch.tensor([[0]])
    for name, call in {
        "planes-nhd-256-gather": lambda: launch.gather(pages, ids, pages.mapping, stage),
        "planes-nhd-256-gather+sum": lambda: launch.gather(pages, ids, pages.mapping, stage, sums),
        "planes-nhd-256-scatter": lambda: launch.scatter(stage, ids, pages.mapping, pages),
        "planes-nhd-256-scatter+sum": lambda: launch.scatter(stage, ids, pages.mapping, pages, sums),
        "sum-16": lambda: launch.checksum(stage, pages.mapping, sums),
    }.items():
        recorder.launches.clear()
        call()
        found, variant = recorder.moved.arguments, known[name]
        assert {key: found[key] for key in variant.constexprs} == variant.constexprs
        assert found["num_warps"] == variant.num_warps
        assert list(variant.signature) == [key for key in found if key != "num_warps"]
        for key, kind in variant.signature.items():
            value = found[key]
            if kind.startswith("*"):
                assert value.dtype == {"*i32": torch.int32, "*i64": torch.int64}[kind], key
            elif kind != "constexpr":
                assert isinstance(value, int) and kind in ("i32", "i64"), key


def test_variants_cover_every_vector_and_mode() -> None:
    seen = {(each.name.split("-")[0], each.sector) for each in launch.variants()}
    assert {("tiles", v) for v in (1, 2, 4, 8, 16)} | {("sum", v) for v in (1, 2, 4, 8, 16)} <= seen
    assert {("planes", v) for v in (1, 4, 8, 16)} <= seen
    modes = {
        tuple(sorted((k, v) for k, v in each.constexprs.items() if k in ("SCATTER", "SUMS")))
        for each in launch.variants()
    }
    assert len(modes - {()}) == 4
