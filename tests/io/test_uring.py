"""Which backend a directory gets: as asked for, found out by trying, and said."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.io import uring
from kvxfer.io.modes import PATHS, IOMode, probe_mode
from kvxfer.io.uring import choose_backend, try_uring
from kvxfer.testing import FaultyIO
from tests.native.uring import needs_uring

BUFFERED = IOMode(False, 4096, "found")


@pytest.fixture(autouse=True)
def _works(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_uring(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(uring, "_said", set())


@pytest.fixture
def io() -> Iterator[FaultyIO]:
    with FaultyIO() as faults:
        yield faults


@pytest.mark.parametrize("direct", ["off", "auto"])
def test_uring_is_tried_and_told(tmp_path: Path, direct: str) -> None:
    found = probe_mode(tmp_path, direct)
    mode = choose_backend(found, tmp_path, "uring")
    assert mode.backend == "uring" and mode.why.startswith(f"{found.why}; io_uring works")
    assert (mode.direct, mode.alignment) == (found.direct, found.alignment)
    assert mode.name in PATHS and mode.name.startswith("uring ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", ["auto", "posix"])
def test_others_try_nothing(tmp_path: Path, wanted: str) -> None:
    before = FaultyIO.calls("uring_setup")
    assert choose_backend(BUFFERED, tmp_path, wanted) == BUFFERED
    assert FaultyIO.calls("uring_setup") == before and BUFFERED.name == "posix buffered"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_a_refusal_is_an_error_with_its_reason(tmp_path: Path, io: FaultyIO, code: int) -> None:
    io.fail("uring_setup", code)
    with pytest.raises(ConfigError, match=rf"io='uring', but .*{tmp_path.name}.*Errno {code}\].*use auto or posix"):
        choose_backend(BUFFERED, tmp_path, "uring")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_file_is_said(tmp_path: Path, io: FaultyIO) -> None:
    io.fail("fallocate", errno.ENOSPC)
    works, why = try_uring(tmp_path, BUFFERED)
    assert not works and "No space left" in why and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("op", ["uring_setup", "uring_submit", "uring_complete"])
def test_a_try_that_hangs_is_left_behind(tmp_path: Path, io: FaultyIO, op: str) -> None:
    io.hang(op)
    assert try_uring(tmp_path, BUFFERED, timeout_s=0.2) == (False, "no answer within 0.2 s")


def test_what_is_missing_is_in_the_log_once_a_directory(
    tmp_path: Path, io: FaultyIO, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        io.fail("uring_register", errno.ENOMEM, after=2, times=1)
        assert "but buffers are not registered" in choose_backend(BUFFERED, tmp_path, "uring").why
    (record,) = [record for record in caplog.records if "io_uring" in record.getMessage()]
    assert "buffers are not registered: [Errno 12]" in record.getMessage()
