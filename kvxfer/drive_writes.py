"""What the kernel has written to the drives under a directory, and how large they are, read off sysfs.

Everybody's writes are in it: other files and programs on the same drive, and what the file system writes for itself.
What a drive writes inside, for its own housekeeping, no file that everybody may read tells: that is drive_wear's. What
is not known is absent, with its reason; nothing raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvxfer.metrics import Kind, Series, Value
from kvxfer.topology import SYSFS, disks_under

SECTOR = 512  # of sysfs, whatever the drive's own
_WRITTEN = 6  # field of a disk's `stat`: sectors written since the system started

DRIVE_WRITTEN = Series(
    "kvxfer_drive_written_bytes_total",
    Kind.COUNTER,
    "What the kernel has written to the drive under a root since the system started, whoever asked for it. No sample: "
    "not known.",
    "bytes",
    (("drive", ()),),  # as many as there are
)


@dataclass(frozen=True, slots=True)
class DriveWrites:
    """The drives under a directory. Sizes in bytes."""

    written: dict[str, int] = field(default_factory=dict)  # since the system started, by disk
    sizes: dict[str, int] = field(default_factory=dict)
    why: str = ""  # why something is not known


class DriveWatch:
    """Looks at the drives under a directory, which are found once. A look touches memory only, never the drive."""

    def __init__(self, path: Path, sysfs: Path = SYSFS, device: tuple[int, int] | None = None) -> None:
        """
        Args:
            sysfs, device: for tests, as `drive_of`'s.
        """
        self._disks, self._why = disks_under(path, sysfs, device)

    def look(self) -> DriveWrites:
        """As it is now."""
        written, not_written = self._read("stat", _WRITTEN)
        sizes, not_sizes = self._read("size", 0)
        whys = [self._why] if self._why else []
        return DriveWrites(written, sizes, "; ".join(whys + not_written + not_sizes))

    def values(self) -> dict[tuple[str, tuple[str, ...]], Value]:
        """The samples of DRIVE_WRITTEN: none for a disk that does not tell."""
        written, _ = self._read("stat", _WRITTEN)
        return {(DRIVE_WRITTEN.name, (disk,)): nbytes for disk, nbytes in written.items()}

    def _read(self, name: str, at: int) -> tuple[dict[str, int], list[str]]:
        """Bytes by disk, of sectors that are the `at`-th word of a file; and whose are not known, and why."""
        found: dict[str, int] = {}
        whys: list[str] = []
        for disk in self._disks:
            try:
                found[disk.name] = int((disk / name).read_text().split()[at]) * SECTOR
            except (OSError, ValueError, IndexError) as exc:
                whys.append(f"{disk.name} does not tell its {name}: {exc}")
        return found, whys


def drive_bytes(path: Path, sysfs: Path = SYSFS, device: tuple[int, int] | None = None) -> tuple[int | None, str]:
    """The size of the one drive under a directory; or None, and why."""
    seen = DriveWatch(path, sysfs, device).look()
    if len(seen.sizes) > 1:
        return None, f"it lies on several drives ({', '.join(seen.sizes)}), and how writes are spread is not known"
    size = next(iter(seen.sizes.values()), 0)
    return (size, "") if size else (None, seen.why or "the drive says that it has no bytes")
