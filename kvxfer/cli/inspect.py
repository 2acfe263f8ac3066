"""`kvxfer inspect`: its options and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import typer

from kvxfer.cli import inspect_view, output
from kvxfer.cli.arguments import Json, Root
from kvxfer.slot import SlotLayout
from kvxfer.store import Finding, Survey, survey_root
from kvxfer.store.root import FORMAT
from kvxfer.store.slab import slab_name

EPILOG = (
    "Exit codes: 0 nothing is wrong with it; 1 it is damaged or of another version; 2 a bad option, or no root there."
)


@dataclass(slots=True)
class LayoutUse:
    """The slabs of one slot layout. Sizes in bytes."""

    layout: SlotLayout
    slabs: int = 0
    file_bytes: int = 0
    slots: int = 0  # that lie in the files
    used: int | None = 0  # None where the index cannot be asked

    @property
    def free(self) -> int | None:
        """Slots that no entry has."""
        return None if self.used is None else self.slots - self.used


def command(
    root: Root,
    as_json: Json = False,
) -> None:
    """Say what is in a root: slabs, slots, entries of each namespace, the index, who has it open.

    Nothing is changed or locked; where a server has the root open, an answer may be a moment old.
    """
    with output.errors(as_json, damaged=output.FAILED):
        seen = survey_root(root)
        if as_json:
            output.print_json(as_object(seen))
        else:
            inspect_view.show(seen, layouts_of(seen), scrub_object(seen))
    if seen.findings:
        raise typer.Exit(output.FAILED)


def layouts_of(seen: Survey) -> Sequence[LayoutUse]:
    """Slots and their use by layout; the layout with the most bytes first."""
    uses: dict[SlotLayout, LayoutUse] = {}
    for slab in seen.slabs.values():
        use = uses.setdefault(slab.layout, LayoutUse(slab.layout, used=0 if seen.index.usable else None))
        use.slabs += 1
        use.file_bytes += slab.file_bytes
        use.slots += slab.whole_slots
    for slab_id, _ in {(record.slab_id, record.slot) for record in seen.index.records if seen.is_there(record)}:
        use = uses[seen.slabs[slab_id].layout]
        use.used = (use.used or 0) + 1
    return sorted(uses.values(), key=lambda use: -use.file_bytes)


def as_object(seen: Survey) -> dict[str, Any]:
    """For `--json`."""
    usable = seen.index.usable
    return {
        "root": str(seen.root),
        "format": FORMAT,
        "alignment": seen.info.alignment,
        "weight_epoch": seen.info.weight_epoch,
        "open_in": list(seen.holders),
        "disk_bytes": seen.disk_bytes,
        "disk_files": seen.disk_files,
        "other_bytes": seen.other_bytes,
        "other_files": seen.other_files,
        "leftover_files": seen.leftovers,
        "index": {
            "state": seen.index.state,
            "why": seen.index.why,
            "file_bytes": seen.index.file_bytes,
            "entries": len(seen.index.records) if usable else None,
        },
        "scrub": scrub_object(seen),
        "slabs": len(seen.slabs),
        "slab_bytes": sum(slab.file_bytes for slab in seen.slabs.values()),
        "layouts": [
            {
                "layout": asdict(use.layout), "slot_bytes": use.layout.slot_bytes, "slabs": use.slabs,
                "file_bytes": use.file_bytes, "slots": use.slots, "used": use.used, "free": use.free,
            }
            for use in layouts_of(seen)
        ],
        "namespaces": [
            {
                "digest": view.digest.hex(), "entries": view.entries if usable else None,
                "weight_epoch": view.weight_epoch, "fields": view.fields, "why": view.why,
            }
            for view in seen.namespaces
        ],
        "findings": [finding_object(finding) for finding in seen.findings],
    }  # fmt: skip


def scrub_object(seen: Survey) -> dict[str, Any]:
    """When a pass of scrubs last came to its end (0: never), and how far the one that is under way has come."""
    under_way = seen.scrubs.under_way
    if under_way is None:
        return {"ended": seen.scrubs.ended, "started": None, "behind": None}
    places = [(record.slab_id, record.slot) for record in seen.index.records if seen.is_there(record)]
    behind = sum(place < under_way.place for place in places) if seen.index.usable else None
    return {"ended": seen.scrubs.ended, "started": under_way.started, "behind": behind}


def finding_object(finding: Finding) -> dict[str, Any]:
    """A finding for `--json`; fields that do not apply are null."""
    record = finding.record
    return {
        "what": finding.what,
        "detail": finding.detail,
        "slab": None if finding.slab_id is None else slab_name(finding.slab_id),
        "slot": finding.slot,
        "offset": finding.offset,
        "namespace": None if record is None else record.digest.hex(),
        "key": None if record is None else record.key.hex(),
        "generation": None if record is None else record.generation,
    }
