"""A filled root, and everything that can happen to it behind the store's back."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer import _native
from kvxfer.slot import SlotLayout
from kvxfer.store import Store
from kvxfer.store.slab import slab_file_bytes
from tests.store import rig

ROWS, SHARED = 50, 20  # chunks of either layout
VICTIM, OTHER = 7, 8  # neither is the last of its slab, nor are both in one


@dataclass
class Filled:
    """A closed root: two namespaces, one for each layout, and where each chunk is."""

    root: Path
    digests: dict[bytes, bytes] = field(default_factory=dict)  # by key
    places: dict[bytes, tuple[Path, int, SlotLayout]] = field(default_factory=dict)  # file, offset, layout

    @property
    def keys(self) -> set[bytes]:
        return set(self.places)

    def in_file(self, path: Path, beyond: int = 0) -> set[bytes]:
        """Chunks in a slab's file whose slot does not end at or before `beyond`."""
        return {
            key
            for key, (file, offset, layout) in self.places.items()
            if file == path and offset + layout.slot_bytes > beyond
        }

    def slot(self, key: bytes) -> bytes:
        path, offset, layout = self.places[key]
        with path.open("rb") as file:
            return os.pread(file.fileno(), layout.slot_bytes, offset)

    def write(self, key: bytes, at: int, data: bytes) -> None:
        path, offset, _ = self.places[key]
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), data, offset + at)

    def flip(self, key: bytes, at: int) -> None:
        self.write(key, at, bytes([self.slot(key)[at] ^ 1]))

    def intact(self, lost: set[bytes]) -> None:
        """Asserts that a store finds every chunk but those, each with its bytes."""
        with Store.open(rig.config(self.root)) as store:
            for namespace, layout in NAMESPACES:
                digest = store.register(namespace, layout)
                names = sorted(key for key in self.keys if self.digests[key] == digest)
                assert names
                assert set(rig.check_all(store, digest, names)) == set(names) - lost
                assert set(store.keys(digest)) == set(names) - lost


NAMESPACES = ((rig.namespace(), rig.ROW), (rig.namespace(model="shared", blocks_per_chunk=8), rig.SHARED))


def fill(root: Path, writers: int = 2, **config: Any) -> Filled:
    """Makes the root."""
    filled = Filled(root)
    with Store.open(rig.config(root, **config), writers=writers) as store:
        for (namespace, layout), numbers in zip(NAMESPACES, (range(ROWS), range(ROWS, ROWS + SHARED)), strict=True):
            digest = store.register(namespace, layout)
            names = [rig.key(i) for i in numbers]
            assert all(rig.put(store, digest, names, layout))
            for name in names:
                place = store.locate(digest, name)
                assert place is not None
                filled.digests[name], filled.places[name] = digest, place
    return filled


Damage = Callable[[Filled], set[bytes]]  # does it, and returns the chunks that are lost by it
ROW_KEY, SHARED_KEY = rig.key(VICTIM), rig.key(ROWS + VICTIM)


def _payload_first(filled: Filled) -> set[bytes]:
    filled.flip(ROW_KEY, 0)
    return {ROW_KEY}


def _payload_last(filled: Filled) -> set[bytes]:
    filled.flip(ROW_KEY, 2 * rig.ROW.segment_stride + rig.ROW.last_segment_bytes - 1)
    return {ROW_KEY}


def _payload_of_two(filled: Filled) -> set[bytes]:
    filled.flip(ROW_KEY, 5)
    filled.flip(SHARED_KEY, 4096 + 17)
    return {ROW_KEY, SHARED_KEY}


def _trailer(at: int, key: bytes, layout: SlotLayout, page: int = 0) -> Damage:
    def damage(filled: Filled) -> set[bytes]:
        filled.flip(key, layout.payload_stride + page * layout.alignment + at)
        return {key}

    return damage


def _zeroed(filled: Filled) -> set[bytes]:
    filled.write(ROW_KEY, 0, bytes(rig.ROW.slot_bytes))
    return {ROW_KEY}


def _copied_over(filled: Filled) -> set[bytes]:
    filled.write(ROW_KEY, 0, filled.slot(rig.key(OTHER)))
    return {ROW_KEY}


def _of_another_generation(filled: Filled) -> set[bytes]:
    image = rig.slot_image(SHARED_KEY, filled.digests[SHARED_KEY], rig.SHARED, 5 << 32 | 1, rig.FULL)
    filled.write(SHARED_KEY, 0, image.array.tobytes())
    return {SHARED_KEY}


def _of_two_writers(filled: Filled) -> set[bytes]:
    """One rank's part is an older chunk's: whole in itself."""
    image = rig.slot_image(SHARED_KEY, filled.digests[SHARED_KEY], rig.SHARED, 5 << 32 | 1, rig.FULL).array.tobytes()
    half = rig.SHARED.payload_stride + 4096
    filled.write(SHARED_KEY, 4096, image[4096:8192])
    filled.write(SHARED_KEY, half, image[half:])
    return {SHARED_KEY}


def _cut_inside_a_slot(filled: Filled) -> set[bytes]:
    path, offset, _ = filled.places[ROW_KEY]
    lost = filled.in_file(path, beyond=offset + 100)
    os.truncate(path, offset + 100)
    return lost


def _cut_to_nothing(filled: Filled) -> set[bytes]:
    path = filled.places[SHARED_KEY][0]
    os.truncate(path, 4096)
    return filled.in_file(path)


def _deleted(filled: Filled) -> set[bytes]:
    path = filled.places[ROW_KEY][0]
    path.unlink()
    return filled.in_file(path)


def _random_header(filled: Filled) -> set[bytes]:
    path = filled.places[ROW_KEY][0]
    with path.open("r+b") as file:
        file.write(os.urandom(4096))
    return filled.in_file(path)


def _too_long(filled: Filled) -> set[bytes]:
    path, _, layout = filled.places[ROW_KEY]
    assert path.stat().st_size == slab_file_bytes(layout, 21)
    os.truncate(path, path.stat().st_size + 1000)
    return set()


def _index_overwritten(filled: Filled) -> set[bytes]:
    path = filled.root / "index" / "data.mdb"
    path.write_bytes(os.urandom(path.stat().st_size))
    return set()


def _index_pages_damaged(filled: Filled) -> set[bytes]:
    path = filled.root / "index" / "data.mdb"
    body = bytearray(path.read_bytes())
    body[2 * 4096 :] = bytes(len(body) - 2 * 4096)
    path.write_bytes(body)
    return set()


def _index_deleted(filled: Filled) -> set[bytes]:
    (filled.root / "index" / "data.mdb").unlink()
    return set()


def _index_lost_and_a_byte(filled: Filled) -> set[bytes]:
    _index_overwritten(filled)
    return _payload_first(filled)


# name: (what is done, what is found)
DAMAGES: dict[str, tuple[Damage, set[str]]] = {
    "first byte of the payload": (_payload_first, {"bad_sum"}),
    "last byte of the payload": (_payload_last, {"bad_sum"}),
    "payload of two slots": (_payload_of_two, {"bad_sum"}),
    "magic of a trailer": (_trailer(3, ROW_KEY, rig.ROW), {"bad_trailer"}),
    "key in a trailer": (_trailer(125, ROW_KEY, rig.ROW), {"bad_trailer"}),
    "sum in a trailer": (_trailer(256, ROW_KEY, rig.ROW), {"bad_trailer"}),
    "checksum of the second trailer": (_trailer(4093, SHARED_KEY, rig.SHARED, 1), {"bad_trailer"}),
    "slot of zeros": (_zeroed, {"bad_trailer"}),
    "slot copied over another": (_copied_over, {"foreign"}),
    "slot of another generation": (_of_another_generation, {"foreign"}),
    "slot of two writers": (_of_two_writers, {"foreign"}),
    "slab cut inside a slot": (_cut_inside_a_slot, {"slab_short", "slot_missing"}),
    "slab cut to its header": (_cut_to_nothing, {"slab_short", "slot_missing"}),
    "slab deleted": (_deleted, {"slab_missing"}),
    "random header": (_random_header, {"slab_header", "slab_missing"}),
    "slab too long": (_too_long, {"slab_long"}),
    "index overwritten": (_index_overwritten, {"index"}),
    "pages of the index zeroed": (_index_pages_damaged, {"index"}),
    "index deleted": (_index_deleted, {"index"}),
    "index overwritten and a byte": (_index_lost_and_a_byte, {"index", "bad_sum"}),
}


def newer_root(filled: Filled) -> str:
    """Another format of the root; what an error has to name."""
    path = filled.root / "kvxfer.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    return "format 2"


def newer_slab(filled: Filled) -> str:
    """A slab of another version; what an error has to name."""
    path = filled.places[ROW_KEY][0]
    with path.open("r+b") as file:
        page = bytearray(file.read(4096))
        page[8:12] = struct.pack("<I", 2)
        page[4092:] = int(_native.lib().kvx_crc32c(bytes(page[:4092]), 4092)).to_bytes(4, "little")
        file.seek(0)
        file.write(page)
    return path.name


NEWER = {"root": newer_root, "slab": newer_slab}
