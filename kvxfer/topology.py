"""Where a drive hangs: the disks under a directory, their NUMA node and PCIe link, read off sysfs. Nothing here raises.

What is not known is None, and `why` has the reason: nothing is guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")

# Of a lane, bytes a second in one direction, line coding taken off: 8b/10b, then 128b/130b, then flits of 256 bytes.
_LANE = {
    2.5: 2.5e9 / 10,
    5.0: 5e9 / 10,
    8.0: 8e9 / 8 * 128 / 130,
    16.0: 16e9 / 8 * 128 / 130,
    32.0: 32e9 / 8 * 128 / 130,
    64.0: 64e9 / 8 * 242 / 256,
}
_GENERATIONS = tuple(_LANE)  # gigatransfers a second of PCIe 1, 2, ...


@dataclass(frozen=True, slots=True)
class Link:
    """A PCIe link."""

    generation: int  # 1, 2, ...
    width: int  # lanes

    @property
    def bytes_per_s(self) -> float | None:
        """What its lanes carry in one direction, packets' headers included: no transfer gets all of it.

        None: a generation that is not known here.
        """
        known = 1 <= self.generation <= len(_GENERATIONS)
        return _LANE[_GENERATIONS[self.generation - 1]] * self.width if known else None

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.width}"


@dataclass(frozen=True, slots=True)
class Drive:
    """What a directory's files lie on."""

    disks: tuple[str, ...] = ()  # "nvme0n1"; several under a RAID or a volume
    numa_node: int | None = None  # of all of them
    links: tuple[Link, ...] = ()  # one for each disk, or none: not of all of them known
    why: str = ""  # what is not known, and why

    @property
    def link_bytes_per_s(self) -> float | None:
        """Of the links together."""
        speeds = [link.bytes_per_s for link in self.links]
        known = [speed for speed in speeds if speed is not None]
        return sum(known) if known and len(known) == len(speeds) else None


def drive_of(path: Path, sysfs: Path = SYSFS, device: tuple[int, int] | None = None) -> Drive:
    """The disks under a file or directory, through partitions, logical volumes and software RAID.

    May hang where the mount is dead, as every look at it does.

    Args:
        sysfs, device: for tests: another tree; the major and minor number instead of the path's.
    """
    disks, why = disks_under(path, sysfs, device)
    return Drive(why=why) if why else _described(disks)


def disks_under(path: Path, sysfs: Path, device: tuple[int, int] | None) -> tuple[list[Path], str]:
    """Where sysfs has the disks that `drive_of` names; or none, and why."""
    try:
        if device is None:
            number = os.stat(path).st_dev
            device = os.major(number), os.minor(number)
        major, minor = device
        node = sysfs / "dev" / "block" / f"{major}:{minor}"
        if not node.exists():
            return [], (f"no drive under it: {major}:{minor} is no block device (a file system of memory, a "
                        "network's, or one of several devices)")  # fmt: skip
        return sorted(set(_disks(node.resolve()))), ""
    except (OSError, ValueError) as exc:
        return [], f"the drive cannot be found: {exc}"


def _disks(node: Path) -> Iterator[Path]:
    if (node / "partition").exists():
        node = node.parent
    below = sorted((node / "slaves").iterdir()) if (node / "slaves").is_dir() else []
    if not below:
        yield node
    for each in below:
        yield from _disks(each.resolve())


def _described(disks: list[Path]) -> Drive:
    functions = {disk: _pci_functions(disk) for disk in disks}
    nodes = {numa_node(place) for places in functions.values() for place in places}
    whys = [f"{disk.name} hangs on no PCI device" for disk, places in functions.items() if not places]
    node = next(iter(nodes)) if len(nodes) == 1 and not whys else None
    if len(nodes) > 1:
        whys.append("its disks are on several NUMA nodes")
    elif node is None and not whys:
        whys.append("the system names no NUMA node")
    links: list[Link] = []
    for disk, places in functions.items():
        found = [link_of(place) for place in places]
        known = [link for link in found if link is not None]
        if not disk.name.startswith("nvme"):
            whys.append(f"{disk.name} is no NVMe drive: what it can do is not known")
        elif len(known) != 1:  # several controllers: paths to one drive, of which nobody says how many carry
            whys.append(f"the link of {disk.name} is not known")
        else:
            links += known
    every = len(links) == len(disks)
    return Drive(
        tuple(disk.name for disk in disks), node, tuple(links) if every else (), "; ".join(dict.fromkeys(whys))
    )


def _pci_functions(disk: Path) -> list[Path]:
    """The PCI devices that a disk hangs on, nearest first; of a multipath NVMe drive those of its controllers."""
    if _is_shared(disk):
        return [place for each in controllers_of(disk) for place in _pci_functions(each)]
    for place in disk.parents:
        if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", place.name):
            return [place]
    return []


def controllers_of(disk: Path) -> list[Path]:
    """Where sysfs has the controllers of an NVMe disk, "nvme0": several are paths to one drive. Of other disks none."""
    places = sorted(disk.parent.iterdir()) if _is_shared(disk) else [disk.parent]
    return [each.resolve() for each in places if re.fullmatch(r"nvme\d+", each.name)]


def _is_shared(disk: Path) -> bool:
    """Whether it is an NVMe drive that may have several controllers."""
    return disk.parent.parent.name == "nvme-subsystem"


def pci_device(bus: str, sysfs: Path = SYSFS) -> Path:
    """Where sysfs has a PCI device; `bus` as NVML writes it, "00000000:3B:00.0"."""
    domain, _, rest = bus.lower().partition(":")
    with_domain = f"{int(domain, 16):04x}:{rest}" if re.fullmatch(r"[0-9a-f]+", domain) else bus
    return sysfs / "bus" / "pci" / "devices" / with_domain


def numa_node(place: Path) -> int | None:
    """Of a PCI device; None where the system does not know (-1)."""
    node = _number(place / "numa_node")
    return None if node is None or node < 0 else node


def link_of(place: Path, which: str = "current") -> Link | None:
    """The link of a PCI device, `current` or `max` (what the device itself can do); None where sysfs does not say."""
    try:
        speed = re.match(r"([\d.]+) GT/s", (place / f"{which}_link_speed").read_text())
    except OSError:
        return None
    width = _number(place / f"{which}_link_width")
    if speed is None or float(speed[1]) not in _LANE or not width:
        return None
    return Link(_GENERATIONS.index(float(speed[1])) + 1, width)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
