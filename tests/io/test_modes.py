"""How files are opened: tried, stepped down with a reason, and never waited for without end."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, IOFault
from kvxfer.io.modes import NETWORK_FILESYSTEMS, filesystem_type, probe_mode, refuse_network
from kvxfer.testing import FaultyIO


def test_direct_io_works_here_or_the_reason_is_given(tmp_path: Path) -> None:
    mode = probe_mode(tmp_path)
    assert mode.alignment >= 4096
    assert ("direct I/O works" in mode.why) if mode.direct else ("direct I/O off: " in mode.why)
    assert list(tmp_path.iterdir()) == []


def test_off_is_not_tried(tmp_path: Path, faults: FaultyIO) -> None:
    mode = probe_mode(tmp_path, "off")
    assert (mode.direct, mode.alignment) == (False, 4096)
    assert mode.why == "direct I/O off: configured; buffered I/O works"


@pytest.mark.parametrize(("op", "code"), [("open", errno.EINVAL), ("pwrite", errno.EINVAL), ("pread", errno.EIO)])
def test_a_refusal_steps_down_and_says_why(tmp_path: Path, faults: FaultyIO, op: str, code: int) -> None:
    faults.fail(op, code, times=1)
    mode = probe_mode(tmp_path)
    assert not mode.direct
    assert mode.why.startswith("direct I/O off: [Errno ")
    assert list(tmp_path.iterdir()) == []


def test_on_refuses_where_it_does_not_work(tmp_path: Path, faults: FaultyIO) -> None:
    faults.fail("open", errno.EINVAL, times=1)
    with pytest.raises(ConfigError, match="direct='on', but direct I/O does not work in .*; use auto or off"):
        probe_mode(tmp_path, "on")


def test_bytes_that_come_back_otherwise_are_noticed(tmp_path: Path, faults: FaultyIO) -> None:
    faults.flip(4100, times=1)
    mode = probe_mode(tmp_path)
    assert not mode.direct
    assert "not as written" in mode.why


@pytest.mark.parametrize("op", ["open", "fallocate", "pread"])
def test_a_call_that_hangs_is_left_behind(tmp_path: Path, faults: FaultyIO, op: str) -> None:
    faults.hang(op, times=1)
    start = time.monotonic()
    mode = probe_mode(tmp_path, timeout_s=0.2)
    assert time.monotonic() - start < 20
    assert not mode.direct
    assert "no answer within 0.2 s" in mode.why
    faults.release()
    for thread in threading.enumerate():
        if thread.name == "kvx-probe":
            thread.join()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_reason_not_to_open(tmp_path: Path, faults: FaultyIO, code: int) -> None:
    faults.fail("fallocate", code)
    mode = probe_mode(tmp_path)
    assert "not tried: fallocate of 16384 bytes" in mode.why
    assert not probe_mode(tmp_path, "off").direct
    faults.fail("fstat", errno.EOPNOTSUPP)  # and statx says nothing of direct I/O
    assert not probe_mode(tmp_path).direct
    assert list(tmp_path.iterdir()) == []


def test_nothing_works(tmp_path: Path, faults: FaultyIO) -> None:
    faults.fail("pwrite", errno.EROFS)
    with pytest.raises(IOFault, match="cannot store files") as info:
        probe_mode(tmp_path)
    assert info.value.errno == errno.EROFS
    with pytest.raises(ConfigError, match="direct='maybe'"):
        probe_mode(tmp_path, "maybe")


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /mnt/a\\040share rw - nfs4 server:/export rw,vers=4.2
31 22 0:27 / /mnt rw shared:3 master:1 - xfs /dev/nvme0n1 rw
32 31 0:28 / /mnt/over rw - nfs server:/x rw
33 31 0:29 / /mnt/over rw - ext4 /dev/nvme1n1 rw
34 22 0:30 / /home rw - fuse.sshfs host:/home rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/cache", "ext4"), ("/mnt/cache", "xfs"), ("/mnt/a share/x", "nfs4"), ("/mnt/over/x", "ext4"),
        ("/mntx", "ext4"), ("/home", "fuse.sshfs"), ("/home/me/cache", "fuse.sshfs"),
    ],
)  # fmt: skip
def test_the_longest_latest_mount_counts(path: str, kind: str) -> None:
    assert filesystem_type(Path(path), MOUNTS) == kind


def test_mountinfo_is_read_or_unknown(tmp_path: Path) -> None:
    assert filesystem_type(tmp_path) not in ("", "unknown")
    assert filesystem_type(tmp_path, "") == "unknown"


@pytest.mark.parametrize(
    "kind",
    "nfs nfs4 cifs smb3 9p ceph lustre gpfs beegfs glusterfs fuse.sshfs fuse.glusterfs".split(),
)
def test_network_file_systems_are_refused(kind: str) -> None:
    assert kind in NETWORK_FILESYSTEMS
    with pytest.raises(ConfigError, match=f"root=/x/cache is on {kind}, a network file system"):
        refuse_network(Path("/x/cache"), f"1 0 0:1 / / rw - {kind} somewhere rw\n")


def test_local_file_systems_are_not() -> None:
    for kind in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"):
        refuse_network(Path("/x"), f"1 0 0:1 / / rw - {kind} dev rw\n")
