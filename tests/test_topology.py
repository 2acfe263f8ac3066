"""Drives under a directory, over trees as sysfs has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvxfer.topology import Drive, Link, drive_of, link_of, numa_node, pci_device


class Tree:
    """A sysfs with block devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)

    def pci(self, bus: str, node: int | None = 0, speed: str = "16.0 GT/s PCIe", width: int | None = 4) -> Path:
        place = self.root / "devices" / "pci0000:00" / bus
        place.mkdir(parents=True)
        if node is not None:
            (place / "numa_node").write_text(f"{node}\n")
        if width is not None:
            (place / "current_link_speed").write_text(speed + "\n")
            (place / "current_link_width").write_text(f"{width}\n")
        return place

    def block(self, place: Path, number: str, slaves: tuple[Path, ...] = ()) -> Path:
        place.mkdir(parents=True)
        (self.root / "dev" / "block" / number).symlink_to(place)
        if slaves:
            (place / "slaves").mkdir()
            for each in slaves:
                (place / "slaves" / each.name).symlink_to(each)
        return place

    def nvme(self, index: int, node: int | None = 0, **link: object) -> Path:
        function = self.pci(f"0000:{index + 1:02x}:00.0", node, **link)
        return self.block(function / "nvme" / f"nvme{index}" / f"nvme{index}n1", f"259:{index}")

    def drive(self, number: str) -> Drive:
        major, minor = map(int, number.split(":"))
        return drive_of(Path("/"), self.root, (major, minor))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


def test_a_whole_drive(tree: Tree) -> None:
    tree.nvme(0, node=1)
    assert tree.drive("259:0") == Drive(("nvme0n1",), 1, (Link(4, 4),), "")
    assert tree.drive("259:0").link_bytes_per_s == pytest.approx(7.877e9, rel=1e-3)


def test_through_a_partition_a_volume_and_a_raid(tree: Tree) -> None:
    first, second = tree.nvme(0), tree.nvme(1)
    part = tree.block(first / "nvme0n1p2", "259:20")
    (part / "partition").write_text("2\n")
    raid = tree.block(tree.root / "devices" / "virtual" / "block" / "md0", "9:0", (part, second))
    tree.block(tree.root / "devices" / "virtual" / "block" / "dm-0", "253:0", (raid,))
    assert tree.drive("259:20").disks == ("nvme0n1",)
    for number in ("9:0", "253:0"):
        drive = tree.drive(number)
        assert (drive.disks, drive.numa_node, drive.why) == (("nvme0n1", "nvme1n1"), 0, "")
        assert drive.link_bytes_per_s == pytest.approx(2 * 7.877e9, rel=1e-3)


def test_a_drive_behind_several_controllers(tree: Tree) -> None:
    subsystem = tree.root / "devices" / "virtual" / "nvme-subsystem" / "nvme-subsys0"
    for index in range(2):
        controller = tree.pci(f"0000:0{index + 1}:00.0", 1) / "nvme" / f"nvme{index}"
        controller.mkdir(parents=True)
        subsystem.mkdir(parents=True, exist_ok=True)
        (subsystem / f"nvme{index}").symlink_to(controller)
    tree.block(subsystem / "nvme0n1", "259:0")
    drive = tree.drive("259:0")
    assert (drive.disks, drive.numa_node, drive.links) == (("nvme0n1",), 1, ())
    assert drive.why == "the link of nvme0n1 is not known"
    (subsystem / "nvme1").unlink()
    assert tree.drive("259:0") == Drive(("nvme0n1",), 1, (Link(4, 4),), "")


def test_what_is_not_known_is_none_with_a_reason(tree: Tree) -> None:
    tree.nvme(0, node=-1)
    assert (tree.drive("259:0").numa_node, tree.drive("259:0").why) == (None, "the system names no NUMA node")
    tree.nvme(1, node=None)
    assert tree.drive("259:1").numa_node is None
    tree.nvme(2, node=1, width=None)
    assert (tree.drive("259:2").links, tree.drive("259:2").why) == ((), "the link of nvme2n1 is not known")
    tree.nvme(3, speed="Unknown speed")
    assert tree.drive("259:3").link_bytes_per_s is None
    apart = tree.block(tree.root / "devices" / "virtual" / "block" / "md0", "9:0", (tree.nvme(4, 0), tree.nvme(5, 1)))
    assert tree.drive("9:0").why == "its disks are on several NUMA nodes"
    assert tree.drive("9:0").numa_node is None
    mixed = tree.block(apart.parent / "md1", "9:1", (tree.nvme(6), tree.nvme(7, width=None)))
    assert tree.drive("9:1").links == ()  # never the half of it
    assert mixed.name not in tree.drive("9:1").disks


def test_a_disk_that_is_no_nvme_drive(tree: Tree) -> None:
    tree.block(tree.pci("0000:00:02.0", 0) / "virtio1" / "block" / "vda", "254:0")
    assert tree.drive("254:0") == Drive(("vda",), 0, (), "vda is no NVMe drive: what it can do is not known")
    tree.block(tree.root / "devices" / "virtual" / "block" / "loop0", "7:0")
    assert "loop0 hangs on no PCI device" in tree.drive("7:0").why


def test_memory_has_no_drive(tree: Tree) -> None:
    assert tree.drive("0:27") == Drive(why=tree.drive("0:27").why)
    assert "no drive under it: 0:27 is no block device" in tree.drive("0:27").why


def test_this_machines_own_directories() -> None:
    assert drive_of(Path("/proc")).disks == ()
    assert "cannot be found" in drive_of(Path("/does/not/exist")).why
    here = drive_of(Path("."))
    number = os.stat(".").st_dev
    assert bool(here.disks) == Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").exists()
    assert here.disks or here.why


@pytest.mark.parametrize(
    ("generation", "width", "gigabytes"),
    [
        (1, 1, 0.25),
        (2, 4, 2.0),
        (3, 16, 15.75),
        (4, 16, 31.5),
        (5, 16, 63.0),
        (6, 16, 121.0),
        (7, 16, None),
        (0, 4, None),
    ],
)
def test_what_a_link_carries(generation: int, width: int, gigabytes: float | None) -> None:
    speed = Link(generation, width).bytes_per_s
    assert speed is None if gigabytes is None else speed == pytest.approx(gigabytes * 1e9, rel=1e-3)


def test_nvmls_name_of_a_pci_device_is_found(tree: Tree) -> None:
    assert pci_device("00000000:3B:00.0", tree.root).name == "0000:3b:00.0"
    assert pci_device("00010000:3B:00.0", tree.root).name == "10000:3b:00.0"
    assert numa_node(pci_device("nonsense", tree.root)) is None
    assert link_of(tree.pci("0000:09:00.0", width=0)) is None
