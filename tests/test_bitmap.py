from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bitmap import CompletionBitmap

FLAGS = st.lists(st.booleans(), max_size=300)


@given(FLAGS)
def test_it_is_the_list_it_was_made_of(flags: list[bool]) -> None:
    bitmap = CompletionBitmap.from_bools(flags)
    assert list(bitmap) == flags == [bitmap[i] for i in range(len(flags))]
    assert len(bitmap) == bitmap.n == len(flags)
    assert bitmap.count() == sum(flags)
    assert bitmap.missing() == [i for i, flag in enumerate(flags) if not flag]
    assert bitmap.leading_run() == (flags.index(False) if False in flags else len(flags))
    assert (bitmap.all(), bitmap.none()) == (all(flags), not any(flags))


@given(FLAGS, st.data())
def test_and_is_what_both_ranks_have(flags: list[bool], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.booleans(), min_size=len(flags), max_size=len(flags)))
    joined = CompletionBitmap.from_bools(flags) & CompletionBitmap.from_bools(others)
    assert list(joined) == [a and b for a, b in zip(flags, others, strict=True)]


@pytest.mark.parametrize(("missing", "run"), [([], 40), ([0], 0), ([28], 28), ([39], 39), (list(range(40)), 0)])
def test_leading_run_of_forty(missing: list[int], run: int) -> None:
    bitmap = CompletionBitmap.from_bools(i not in missing for i in range(40))
    assert (bitmap.leading_run(), bitmap.missing()) == (run, missing)


def test_from_status_takes_only_ok() -> None:
    status = bytes([0, 0, 2, 0, 1, 11, 255])
    want = CompletionBitmap.from_bools([1, 1, 0, 1, 0, 0, 0])
    assert CompletionBitmap.from_status(status) == want
    assert CompletionBitmap.from_status(np.frombuffer(status, np.uint8)) == want
    assert CompletionBitmap.from_status(bytearray(status)) == want
    assert CompletionBitmap.from_status(b"") == CompletionBitmap.empty(0)
    with pytest.raises(ValueError, match="uint8"):
        CompletionBitmap.from_status(np.array([0, 1]))


def test_indices_as_of_a_list() -> None:
    bitmap = CompletionBitmap.from_bools([True, False])
    assert bitmap[-2] is True
    assert bitmap[-1] is False
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"chunk {index} of 2"):
            bitmap[index]


def test_bitmaps_of_different_jobs_are_not_joined() -> None:
    with pytest.raises(ValueError, match="3 and 4"):
        CompletionBitmap.full(3) & CompletionBitmap.full(4)
    with pytest.raises(TypeError):
        CompletionBitmap.full(3) & 1  # type: ignore[operator]


def test_equal_by_value_and_of_the_same_length() -> None:
    assert CompletionBitmap.full(3) == CompletionBitmap.from_bools([True] * 3)
    assert CompletionBitmap.empty(3) != CompletionBitmap.empty(4)
    assert len({CompletionBitmap.full(3), CompletionBitmap(3, 7)}) == 1


@pytest.mark.parametrize(("n", "bits"), [(3, 8), (0, 1), (-1, 0), (3, -1)])
def test_bits_beyond_the_end_are_refused(n: int, bits: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        CompletionBitmap(n, bits)


def test_repr_is_short() -> None:
    one = CompletionBitmap.from_bools(i != 28 for i in range(40))
    assert repr(one) == "CompletionBitmap(39 of 40, prefix 28, missing 28)"
    assert repr(CompletionBitmap.full(2)) == "CompletionBitmap(2 of 2, prefix 2)"
    assert repr(CompletionBitmap.empty(10_000)).endswith("missing 0, 1, 2, 3, 4, 5, 6, 7, ...)")
