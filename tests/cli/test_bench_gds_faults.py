"""`kvxfer bench gds`: bad input, faults of the drive, files that are given; no speed for wrong bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer.cli import bench_files, bench_lanes, main
from kvxfer.cli.bench_files import PREFIX
from kvxfer.io.posix import PosixFile
from kvxfer.io.system import sys_open
from kvxfer.testing import FaultyIO
from tests.cli.bench_gds_rig import INSIDE, QUICK, WHOLE, Capsys, K, M, bench, nothing_left
from tests.cli.commands import PROJECT, forked, run_on_terminal

__all__ = ["nothing_left"]


# ---- bad input


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--sizes 64X", ["size '64X'"]),
        ("--sizes 64KB", ["size '64KB'"]),
        ("--sizes -64K", ["size '-64K'"]),
        ("--sizes 64K,", ["size ''"]),
        ("--sizes 0", ["--sizes 0", "4096"]),
        ("--sizes 1000", ["--sizes 1000", "4096"]),
        ("--sizes 2G --span 64G", ["--sizes 2147483648"]),
        ("--sizes 64K,65536", ["twice"]),
        ("--threads 0", ["--threads 0"]),
        ("--depth -1", ["--depth -1"]),
        ("--depth 16 --threads 17", ["--threads 17 x --depth 16"]),
        ("--sizes 1G --span 64G", ["bytes in flight"]),
        ("--duration 0", ["--duration 0"]),
        ("--duration nan", ["--duration nan"]),
        ("--duration inf", ["--duration inf"]),
        ("--repetitions 0", ["--repetitions 0"]),
        ("--limit 4K", ["--limit 4096", "65536"]),
        ("--span 64K", ["--span 65536"]),
        ("--span 2000T", ["--span"]),
        ("--read-percent 100", ["--read-percent 100"]),
        ("--drive-gbps 0", ["--drive-gbps 0"]),
        ("--drive-gbps nan", ["--drive-gbps nan"]),
        ("--seed -1", ["--seed -1"]),
        ("--operation erase", ["--operation 'erase'", "read, write, mixed"]),
        ("--mode fast", ["--mode 'fast'", "auto, direct, buffered, gds, compat"]),
        ("--memory flash", ["--memory 'flash'"]),
        ("--layout zigzag", ["--layout 'zigzag'"]),
        ("--peer dd", ["--peer 'dd'", "fio"]),
        ("--mode gds", ["--mode gds", "--memory host"]),
        ("--mode compat", ["--mode compat", "--memory host"]),
        ("--overwrite", ["--overwrite", "read"]),
        ("--overwrite --operation write --yes", ["is a directory"]),
        ("--plot picture.jpg", ["--plot picture.jpg", ".png"]),
        ("--plot /does/not/exist/picture.png", ["/does/not/exist"]),
    ],
)
def test_a_bad_option_is_one_line_and_touches_nothing(
    arguments: str, names: list[str], tmp_path: Path, capsys: Capsys
) -> None:
    opens = FaultyIO.calls("open")
    assert main(["bench", "gds", str(tmp_path), *QUICK, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [name for name in names if name not in err] == []
    assert FaultyIO.calls("open") == opens


def test_a_directory_that_is_not_there(tmp_path: Path, capsys: Capsys) -> None:
    code, said = bench(capsys, tmp_path / "nowhere")
    assert (code, said["error"]["type"]) == (2, "ConfigError")
    assert "nowhere does not exist" in said["error"]["message"]


def test_two_directories_are_not_one(tmp_path: Path, capsys: Capsys) -> None:
    code, said = bench(capsys, tmp_path, tmp_path)
    assert (code, "one directory, or files" in said["error"]["message"]) == (2, True)


def test_a_directory_that_may_only_be_read(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.fail("open", errno.EROFS)
        code, said = bench(capsys, tmp_path)
    assert (code, said["error"]["type"]) == (2, "IOFault")
    assert "Read-only file system" in said["error"]["message"]


def test_a_full_disk(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.fail("fallocate", errno.ENOSPC, after=2)  # the probe's, and the first thread's
        code, said = bench(capsys, tmp_path, "--threads", 2, "--mode", "direct")
    assert (code, said["error"]["type"]) == (2, "IOFault")
    assert "fallocate" in said["error"]["message"]
    with FaultyIO() as io:
        io.fail("pwrite", errno.ENOSPC, offset=INSIDE)
        code, said = bench(capsys, tmp_path)
    assert (code, "No space left" in said["error"]["message"]) == (2, True)


def test_room_is_kept_free(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = bench(capsys, tmp_path, "--span", "1T")
    assert (code, "must stay free" in said["error"]["message"]) == (2, True)
    monkeypatch.setattr(bench_files, "filesystem_type", lambda _: "tmpfs")
    monkeypatch.setattr(bench_files, "_memory_available", lambda: 7 * M)
    code, said = bench(capsys, tmp_path)
    assert (code, "is memory: 8388608 bytes are needed" in said["error"]["message"]) == (2, True)
    monkeypatch.setattr(bench_files, "filesystem_type", lambda _: "nfs4")
    code, said = bench(capsys, tmp_path)
    assert (code, "nfs4, a network file system" in said["error"]["message"]) == (2, True)


def test_direct_that_does_not_work_is_said(tmp_path: Path, capsys: Capsys) -> None:
    for mode in ("direct", "auto"):
        with FaultyIO() as io:
            io.fail("open", errno.EINVAL, times=1)
            code, said = bench(capsys, tmp_path, "--mode", mode)
        if mode == "direct":
            assert (code, said["error"]["type"]) == (2, "ConfigError")
            assert "Invalid argument" in said["error"]["message"]
        else:
            assert (code, said["mode"]) == (0, "buffered")
            assert any(step.startswith("direct: ") and "Invalid argument" in step for step in said["steps"])


def test_sizes_that_direct_io_does_not_take(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.cli import bench_ways
    from kvxfer.io.modes import IOMode

    monkeypatch.setattr(bench_ways, "probe_mode", lambda *_: IOMode(True, 16 * K, "direct I/O works"))
    code, said = bench(capsys, tmp_path, "--mode", "direct", "--sizes", "64K,4K")
    assert (code, "--sizes 4096 is no multiple of 16384" in said["error"]["message"]) == (2, True)
    code, said = bench(capsys, tmp_path, "--sizes", "64K,4K")
    assert (code, said["mode"]) == (0, "buffered")
    assert any("--sizes 4096 is no multiple" in step for step in said["steps"])


# ---- faults


@pytest.mark.parametrize("operation", ["read", "write", "mixed"])
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_one_wrong_bit_takes_the_speed_away(tmp_path: Path, capsys: Capsys, operation: str, mode: str) -> None:
    with FaultyIO() as io:
        rule = io.flip(4321, offset=INSIDE)
        code, report = bench(capsys, tmp_path, "--operation", operation, "--mode", mode, *WHOLE, "--sizes", "64K,128K")
        assert rule.hits > 0
    assert (code, report["ok"]) == (1, False)
    for row in report["rows"]:
        assert (row["status"], row["parts"]) == ("WRONG", [])
        assert row["cpu_cores"] is row["drive_percent"] is row["tool_percent"] is None
        assert row["wrong_requests"] >= 1
        assert f"file 0 offset {M // row['size'] * row['size'] + 4321:#x}: 1 bytes" in row["wrong"][0]


def test_a_wrong_bit_is_shown_to_people(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.flip(0, offset=INSIDE)
        assert main(["bench", "gds", str(tmp_path), *QUICK, *WHOLE]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "GB/s" in out.split("max")[0]  # the head of the table
    assert not [line for line in out.splitlines() if line.startswith("64.0 KiB  read") and "." in line[10:]]


def test_short_transfers_go_on_where_they_stopped_and_are_counted(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.short("pread", 64 * K, offset=INSIDE)
        code, report = bench(capsys, tmp_path, "--sizes", "128K", *WHOLE[:1], "24M", *WHOLE[2:])
    (row,) = report["rows"]
    assert (code, row["status"], row["errors"]) == (0, "ok", {})
    assert row["extra_calls"] == 3  # the place comes once in each burst of 64 requests


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.short("pread", 0, offset=INSIDE)
        code, report = bench(capsys, tmp_path, *WHOLE)
    (row,) = report["rows"]
    assert (code, row["status"]) == (1, "errors")
    assert set(row["errors"]) == {"short"}


@pytest.mark.parametrize("operation", ["read", "write", "mixed"])
def test_requests_that_fail_are_counted_by_errno(tmp_path: Path, capsys: Capsys, operation: str) -> None:
    call = "pread" if operation == "read" else "pwrite"
    with FaultyIO() as io:
        # a write at the place fills the file first, and may warm up
        rule = io.fail(call, errno.EIO, after=int(operation != "read"), times=2, offset=INSIDE)
        code, report = bench(capsys, tmp_path, "--operation", operation, "--limit", "64M", "--seed", 1)
        assert rule.hits == 2
    (row,) = report["rows"]
    assert (code, row["status"], row["errors"], row["wrong"]) == (1, "errors", {"EIO": 2}, [])
    assert row["why"] == "EIO 2 times"
    assert row["parts"]


def test_a_drive_that_takes_no_writes_has_no_result(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.fail("pwrite", errno.EIO, after=3 + 16)  # the probe's four, and the filling
        code, report = bench(capsys, tmp_path, "--operation", "write", "--mode", "direct")
    (row,) = report["rows"]
    assert (code, row["status"]) == (1, "too few")
    assert row["errors"]["EIO"] >= 100


def test_a_write_that_cannot_be_read_back_is_not_believed(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.fail("pread", errno.EIO, offset=INSIDE)
        code, report = bench(capsys, tmp_path, "--operation", "write", *WHOLE)
    (row,) = report["rows"]
    assert (code, row["status"], row["parts"]) == (1, "WRONG", [])
    assert "could not be read back to be checked: EIO" in row["why"]


@pytest.mark.parametrize("operation", ["read", "write", "mixed"])
def test_reads_that_bring_nothing_prove_nothing(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Not even of writes: what is read back comes to memory that was written over."""

    class Idle(PosixFile):
        def read(self, buf: Any, size: int | None = None, file_offset: int = 0) -> int:
            return buf.nbytes if size is None else size

    monkeypatch.setattr("kvxfer.cli.bench_ways.PosixFile", Idle)
    code, report = bench(capsys, tmp_path, "--operation", operation)
    assert (code, report["rows"][0]["status"]) == (1, "WRONG")


def test_a_request_that_never_returns_ends_the_run(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_lanes, "STALL_S", 0.3)
    monkeypatch.setattr(bench_lanes, "PATIENCE_S", 0.3)
    monkeypatch.setattr(bench_lanes, "CLOSE_S", 0.1)
    with FaultyIO() as io:
        io.hang("pread", offset=INSIDE)
        code, said = bench(capsys, tmp_path, *WHOLE)
    assert (code, said["error"]["type"]) == (2, "IOFault")
    assert "have not come back" in said["error"]["message"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_file(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "kvxfer.cli", "bench", "gds", str(tmp_path), *QUICK, "--limit", "100T"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(tmp_path.glob(f"{PREFIX}*")) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (code, "")
    assert f"interrupted by signal {int(number)}" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


# ---- files that are given


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one", tmp_path / "two"]
    for path, nbytes in zip(paths, (4 * M + 100, 2 * M), strict=True):
        path.write_bytes(os.urandom(nbytes))
    return paths


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_files_given_are_only_read(files: list[Path], capsys: Capsys, mode: str, threads: int) -> None:
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    code, report = bench(capsys, *files, "--mode", mode, "--threads", threads)
    assert (code, report["rows"][0]["status"]) == (0, "ok")
    assert "first reading" in report["verified"]
    assert report["options"]["seed"] is None
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["one", "two"]


def test_what_is_used_of_files_given_is_said(files: list[Path], capsys: Capsys) -> None:
    """And not what might have been: they are smaller than --span."""
    whole = sum(path.stat().st_size // 4096 * 4096 for path in files)
    _, report = bench(capsys, *files, "--threads", 1, "--span", "1G")
    assert report["used_bytes"] == whole < report["options"]["span_bytes"]
    done = forked("bench", "gds", *files, *QUICK, "--span", "1G")
    assert "6.0 MiB of files" in done.stdout


def test_a_file_given_that_may_only_be_read(files: list[Path], capsys: Capsys) -> None:
    flags: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvxfer.cli.bench_ways.sys_open", lambda path, how: (flags.append(how), sys_open(path, how))[1])
        code, _ = bench(capsys, files[0])
    assert code == 0
    assert flags and not any(how & (os.O_RDWR | os.O_WRONLY | os.O_CREAT) for how in flags)


def test_a_file_given_that_comes_otherwise_is_wrong(files: list[Path], capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.flip(9, after=1, offset=INSIDE)  # the first reading passes
        code, report = bench(capsys, files[0], "--mode", "direct", *WHOLE)
    (row,) = report["rows"]
    assert (code, row["status"], row["parts"]) == (1, "WRONG", [])
    assert "one offset 0x100000: 65536 bytes do not match their first reading" in row["wrong"][0]


def test_writing_to_files_has_to_be_asked_for(files: list[Path], capsys: Capsys) -> None:
    before = [path.read_bytes() for path in files]
    code, said = bench(capsys, *files, "--operation", "write")
    assert (code, "give --overwrite" in said["error"]["message"]) == (2, True)
    code, said = bench(capsys, *files, "--operation", "write", "--overwrite")
    assert (code, "no terminal to ask on" in said["error"]["message"]) == (2, True)
    code, out, shown = run_on_terminal("n\n", "bench", "gds", *QUICK, *files, "--operation", "write", "--overwrite")
    assert (code, out) == (1, "")
    assert "will be DESTROYED" in shown
    assert [path.read_bytes() for path in files] == before


def test_files_that_may_be_overwritten_are_and_stay(files: list[Path], capsys: Capsys) -> None:
    before = [path.read_bytes() for path in files]
    code, report = bench(capsys, *files, "--operation", "mixed", "--overwrite", "--yes")
    assert (code, report["rows"][0]["status"]) == (0, "ok")
    after = [path.read_bytes() for path in files]
    assert [len(each) for each in after] == [len(each) for each in before]
    assert after[0][: 4 * M] != before[0][: 4 * M]
    assert after[0][4 * M :] == before[0][4 * M :]  # what is no whole page
    assert after[1] != before[1]


def test_files_that_cannot_be_used(files: list[Path], tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "small").write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "pipe")
    os.link(files[0], tmp_path / "again")
    for given, text in (
        ([tmp_path / "small"], "has 100 bytes"),
        ([tmp_path / "pipe"], "no regular file"),
        ([files[0], tmp_path / "again"], "is there twice"),
        ([files[0], tmp_path / "nowhere"], "No such file"),
        ([files[0], tmp_path], "no regular file"),
        ([files[0], "--peer", "fio"], "--peer fio"),
    ):
        code, said = bench(capsys, *given)
        assert (code, text in said["error"]["message"]) == (2, True), said


def test_a_file_that_is_too_small_for_what_is_in_flight(files: list[Path], capsys: Capsys) -> None:
    code, report = bench(capsys, files[1], "--sizes", "64K,1M")
    assert code == 0
    assert [row["status"] for row in report["rows"]] == ["ok", "too few"]
    assert "holds 2 requests of 1048576 bytes, 4 are in flight" in report["rows"][1]["why"]
