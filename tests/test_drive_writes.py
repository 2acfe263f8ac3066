"""What sysfs tells of a drive's writes and size, over trees as it has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.drive_writes import DRIVE_WRITTEN, DriveWatch, drive_bytes
from tests.test_topology import Tree

STAT = "   10 1 222 5   20 2 {sectors} 9 0 14 14 0 0 0 0 0 0\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


def told(disk: Path, sectors: int, size: int = 1 << 31) -> Path:
    (disk / "stat").write_text(STAT.format(sectors=sectors))
    (disk / "size").write_text(f"{size}\n")
    return disk


def test_a_partition_is_its_whole_disk(tree: Tree) -> None:
    disk = told(tree.nvme(0), 4000)
    part = told(tree.block(disk / "nvme0n1p2", "259:20"), 7, 100)
    (part / "partition").write_text("2\n")
    watch = DriveWatch(Path("/"), tree.root, (259, 20))
    seen = watch.look()
    assert (seen.written, seen.sizes, seen.why) == ({"nvme0n1": 4000 * 512}, {"nvme0n1": 1 << 40}, "")
    told(disk, 4100)
    assert watch.values() == {(DRIVE_WRITTEN.name, ("nvme0n1",)): 4100 * 512}
    assert drive_bytes(Path("/"), tree.root, (259, 20)) == (1 << 40, "")


def test_several_drives_are_told_apart_and_have_no_one_size(tree: Tree) -> None:
    first, second = told(tree.nvme(0), 10), told(tree.nvme(1), 20)
    tree.block(tree.root / "devices" / "virtual" / "block" / "md0", "9:0", (first, second))
    assert DriveWatch(Path("/"), tree.root, (9, 0)).look().written == {"nvme0n1": 5120, "nvme1n1": 10240}
    size, why = drive_bytes(Path("/"), tree.root, (9, 0))
    assert size is None and "nvme0n1, nvme1n1" in why


@pytest.mark.parametrize("text", ["", "1 2 3", "a b c d e f g h"])
def test_a_disk_that_does_not_tell_has_no_sample(tree: Tree, text: str) -> None:
    disk = told(tree.nvme(0), 1, 0)
    (disk / "stat").write_text(text)
    watch = DriveWatch(Path("/"), tree.root, (259, 0))
    assert watch.values() == {} and "nvme0n1 does not tell its stat" in watch.look().why
    (disk / "stat").unlink()
    assert watch.values() == {}
    assert drive_bytes(Path("/"), tree.root, (259, 0)) == (None, watch.look().why)


def test_memory_has_no_drive(tree: Tree) -> None:
    watch = DriveWatch(Path("/"), tree.root, (0, 27))
    assert watch.values() == {} and "no block device" in watch.look().why
    size, why = drive_bytes(Path("/"), tree.root, (0, 27))
    assert size is None and "0:27 is no block device" in why


def test_an_empty_drive_is_no_size(tree: Tree) -> None:
    told(tree.nvme(0), 1, 0)
    assert drive_bytes(Path("/"), tree.root, (259, 0)) == (None, "the drive says that it has no bytes")
