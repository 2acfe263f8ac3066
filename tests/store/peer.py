"""A process that has a root open and does as it is told: python -m tests.store.peer ROOT, JSON lines in and out.

`Peer` is the test's end of it. Calls wait for a bounded time; `send` and `answer` are the halves of a call, for peers
that are to block or to die in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.config import EngineConfig
from kvxfer.engine import TransferEngine
from kvxfer.errors import KvxferError
from kvxfer.jobs import STORE, JobRunner
from kvxfer.slot import SlotLayout
from kvxfer.store import Entry, Reservation, Store, members, room, uses
from kvxfer.store import index as index_module
from kvxfer.store import store as store_module
from kvxfer.store.records import LeaseName, LeaseRow, gone
from kvxfer.testing import FaultyIO
from tests.engine.rig import GEOMETRY, keys_of, namespace_of, ranks
from tests.engine.rig import expect as expect_pages
from tests.forks import Fork
from tests.oracle import POISON, Model
from tests.store import rig

CHECKOUT = Path(__file__).parents[2]
WAIT_S = 40.0  # for an answer: only ever reached by a defect
CHUNKS = 160  # of the model that the engines move
LAYOUTS = {"row": rig.ROW, "shared": rig.SHARED}
MODULES = {"members": members, "room": room, "index": index_module, "store": store_module}


class Dead(Exception):
    """The peer has ended, instead of answering."""


class Refused(Exception):
    """The peer's call raised; the text begins with the name of what."""


class Peer:
    """One process. Leaving the `with` block ends it, stopped or not."""

    def __init__(self, root: Path, *, env: dict[str, str] | None = None) -> None:
        self.root = root
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        (their_input, told), (told_by_it, their_output) = os.pipe(), os.pipe()
        streams = (their_input, their_output, self._errors.fileno())
        self._process = self._start(streams, env)
        for descriptor in streams[:2]:
            os.close(descriptor)
        self._input, self._output = open(told, "w", buffering=1), open(told_by_it)  # noqa: SIM115
        self.pid = self._process.pid
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _start(self, streams: tuple[int, int, int], env: dict[str, str] | None) -> Fork | subprocess.Popen[bytes]:
        """A fork, but for an environment that counts before an interpreter starts."""
        if env is None:
            return Fork("tests.store.peer", str(self.root), streams=streams, env={**os.environ})
        return subprocess.Popen(
            [sys.executable, "-m", "tests.store.peer", str(self.root)], stdin=streams[0], stdout=streams[1],
            stderr=streams[2], cwd=CHECKOUT, env=os.environ | {"PYTHONPATH": str(CHECKOUT)} | env,
        )  # fmt: skip

    def _listen(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put("")

    def send(self, verb: str, *args: Any, **named: Any) -> Peer:
        """The first half of a call."""
        with suppress(BrokenPipeError):  # `answer` says so
            self._input.write(json.dumps([verb, args, named]) + "\n")
        return self

    def answer(self, timeout: float = WAIT_S) -> Any:
        """The second half.

        Raises:
            Dead, Refused, TimeoutError: it has ended, the call raised, there is no answer yet.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no answer in {timeout} s: {self.errors()}") from None
        if not line:
            self._lines.put("")
            raise Dead(f"{self._process.wait(WAIT_S)}: {self.errors()}")
        good, value = json.loads(line)
        if not good:
            raise Refused(value)
        return value

    def call(self, verb: str, *args: Any, timeout: float = WAIT_S, **named: Any) -> Any:
        """Has something done."""
        return self.send(verb, *args, **named).answer(timeout)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal; a stop has happened when this returns."""
        self._process.send_signal(number)
        end = time.monotonic() + WAIT_S
        while number is signal.SIGSTOP and self._state() != "T":
            assert time.monotonic() < end
            time.sleep(0.001)

    def _state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        """SIGKILL; it has gone when this returns."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def died(self) -> int:
        """Waits for its end; the exit status."""
        return self._process.wait(WAIT_S)

    def errors(self) -> str:
        """What it wrote to its standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        """Ends it, whatever it is doing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(WAIT_S)
        self._listener.join(WAIT_S)
        for pipe in (self._input, self._output):
            with suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


def name_of(number: int) -> bytes:
    """The key of a chunk."""
    return rig.key(number)


class Actor:
    """What a peer can do: every public method is a verb."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.faulty = FaultyIO()
        self.digests: dict[int, bytes] = {}
        self.layouts: dict[int, SlotLayout] = {}
        self.slots: dict[int, Reservation] = {}
        self.pins: dict[int, list[Entry | None]] = {}
        self._store: Store | None = None
        self._number = 0
        self._model: Model | None = None
        self._engines: Any = None

    @property
    def store(self) -> Store:
        assert self._store is not None
        return self._store

    def set(self, where: str, name: str, value: float) -> None:
        """A constant of a module."""
        assert hasattr(MODULES[where], name)
        setattr(MODULES[where], name, value)

    def set_time(self, at: float) -> None:
        """What uses are noted by, from now on."""
        uses.clock = lambda: at

    def open(self, *, housekeeping: bool = False, writers: int = 2, **config: Any) -> None:
        self._store = Store.open(rig.config(self.root, **config), writers=writers, housekeeping=housekeeping)

    def open_tool(self) -> None:
        """As a command does that writes for no request."""
        self._store = Store.open_existing(self.root, housekeeping=False)

    def register(self, n: int = 0, layout: str = "row") -> str:
        self.layouts[n] = LAYOUTS[layout]
        self.digests[n] = self.store.register(rig.namespace(extra={"n": n}), LAYOUTS[layout])
        return self.digests[n].hex()

    def put(self, keys: Sequence[int], n: int = 0, mask: int = rig.FULL) -> list[bool]:
        return rig.put(self.store, self.digests[n], [*map(name_of, keys)], self.layouts[n], mask)

    def reserve(self, count: int, n: int = 0) -> list[list[int]]:
        """(handle, slab, slot, generation) of each slot."""
        out = []
        for slot in self.store.reserve(self.digests[n], self.layouts[n], count):
            self._number += 1
            self.slots[self._number] = slot
            out.append([self._number, slot.slab.slab_id, slot.slot, slot.generation])
        return out

    def write(self, handles: Sequence[int], keys: Sequence[int], n: int = 0, mask: int = rig.FULL) -> None:
        for handle, number in zip(handles, keys, strict=True):
            rig.write(self.slots[handle], self.digests[n], name_of(number), mask)

    def commit(self, handles: Sequence[int], keys: Sequence[int], n: int = 0, mask: int = rig.FULL) -> list[bool]:
        items = [(name_of(k), self.slots.pop(h), mask) for h, k in zip(handles, keys, strict=True)]
        return self.store.commit(self.digests[n], items)

    def release(self, handles: Sequence[int]) -> None:
        self.store.release([self.slots.pop(handle) for handle in handles])

    def quarantine(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.store.quarantine(self.slots[handle])

    def lookup(self, keys: Sequence[int], n: int = 0) -> int:
        return self.store.lookup_prefix(self.digests[n], map(name_of, keys))

    def find(self, keys: Iterable[int], n: int = 0, mask: int | None = None) -> list[int]:
        return [k for k in keys if self.store.contains(self.digests[n], name_of(k), mask)]

    def check_all(self, keys: Sequence[int], n: int = 0) -> list[int]:
        """Those that are stored; fails unless their bytes are right and no two of them have one slot."""
        numbers = {name_of(k): k for k in keys}
        return [numbers[name] for name in rig.check_all(self.store, self.digests[n], numbers)]

    def pin(self, keys: Sequence[int], n: int = 0) -> list[Any]:
        self._number += 1
        self.pins[self._number] = self.store.pin(self.digests[n], [*map(name_of, keys)])
        return [self._number, [entry is not None for entry in self.pins[self._number]]]

    def unpin(self, handle: int) -> None:
        self.store.unpin(self.pins.pop(handle))

    def invalidate(self, keys: Sequence[int], n: int = 0, times: int = 1) -> list[bool]:
        entries = self.store.pin(self.digests[n], [*map(name_of, keys)])
        done = [entry is not None and self.store.invalidate(entry, "bad_sum") for entry in entries]
        self.store.unpin(entries)
        return done

    def touch(self, keys: Sequence[int], n: int = 0) -> None:
        self.store.touch(self.digests[n], [*map(name_of, keys)])

    def maintain(self, reap: bool = True) -> bool:
        if reap:
            self.store._next_reap = 0.0
            self.store._parts.room._finish_at = 0.0
        return self.store.maintain()

    def bump_epoch(self) -> int:
        return self.store.bump_epoch()

    def weight_epoch(self) -> int:
        return self.store.weight_epoch

    def stats(self) -> dict[str, Any]:
        return dataclasses.asdict(self.store.stats())

    def close(self, timeout: float = 5.0) -> bool:
        return self.store.close(timeout)

    def fds(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    # ---- faults ------------------------------------------------------------------------------------------

    def fault(self, action: str, op: str, *args: Any, **named: Any) -> None:
        getattr(self.faulty, action)(op, *args, **named)

    def calls(self, op: str) -> int:
        return self.faulty.calls(op)

    def no_faults(self) -> None:
        self.faulty.__exit__(None, None, None)

    def take_leases(self) -> int:
        """Deletes what other processes have taken from the index, as if they had ended."""
        with self.store._changing():
            rows = foreign_leases(self.store)
            assert self.store._index.apply([], [], [gone(row) for row in rows])
            self.store._follower._apply([LeaseName(row.epoch, row.number) for row in rows])
        return len(rows)

    def break_index(self, wait: float) -> None:
        """The index is of no more use to this process, and may be mended after `wait` seconds."""
        self.store._index._broken = True
        self.store._index._next_recovery = time.monotonic() + wait

    # ---- the picture -------------------------------------------------------------------------------------

    def picture(self) -> dict[str, Any]:
        """All that this process believes."""
        store = self.store
        table, room_, follower = store._table, store._parts.room, store._follower
        numbers = store.stats()
        with table.lock:
            living = table.living()
            assert len(living) == table.entries
            assert sum(entry.slab.slot_bytes for entry in living) == table.live_bytes
            slabs = {}
            for slab_id, slab in table.slabs_by_id.items():
                free = [slot for slot in range(len(slab._taken)) if not slab._taken[slot]]
                assert slab.free_slots == len(free), (slab, slab.free_slots, free)
                assert not slab.retired
                assert (slab in table.classes[slab.layout].available) == bool(free)
                named = os.stat(slab.path)
                opened = os.fstat(slab._file.fd)
                assert (named.st_ino, named.st_dev) == (opened.st_ino, opened.st_dev), f"{slab} is another file"
                slabs[str(slab_id)] = {"slots": slab.num_slots, "usable": slab.usable, "free": free}
            return {
                "entries": {
                    (entry.digest + entry.key).hex(): [entry.slab.slab_id, entry.slot, entry.generation, entry.mask]
                    for entry in living
                },
                "slabs": slabs,
                "leases": {str(row.number): list(map(list, row.slots)) for row in own_leases(store)},
                "foreign": {f"{row.epoch}:{row.number}": list(map(list, row.slots)) for row in foreign_leases(store)},
                "foreign_slots": numbers.foreign_slots,
                "members": {str(row.seat): [row.epoch, row.pid] for row in follower.members.values()},
                "me": [follower.me.seat, follower.me.epoch, follower.me.pid],
                "rows": {str(row.slab_id): [int(row.state), row.cost] for row in room_.rows.values()},
                "used": [room_.used_bytes - room_.other_bytes, room_.used_files - room_.other_files],
                "behind": store._index._env is None or store._index._env.info()["last_txnid"] != store._index._position,
                "doomed": table.has_doomed, "held": numbers.reserved_slots + numbers.quarantined_slots,
                "pinned": numbers.pinned_entries,
            }  # fmt: skip

    # ---- loops, for a while ------------------------------------------------------------------------------

    def churn(self, seed: int, seconds: float, keys: int = 400, namespaces: Sequence[int] = (0,)) -> dict[str, int]:
        """Puts, replacements, invalidations, reservations that are given back."""
        draw = random.Random(seed)
        end = time.monotonic() + seconds
        counts = {"puts": 0, "stored": 0}
        while time.monotonic() < end:
            n = draw.choice(list(namespaces))
            numbers = draw.sample(range(keys), draw.randint(1, 12))
            done = self.put(numbers, n, draw.choice([1, 3, rig.FULL]))
            counts["puts"] += len(done)
            counts["stored"] += sum(done)
            if draw.random() < 0.1:
                self.invalidate(draw.sample(range(keys), 5), n)
            if draw.random() < 0.1:
                taken = self.reserve(draw.randint(1, 8), n)
                self.release([handle for handle, *_ in taken])
        return counts

    # ---- engines -----------------------------------------------------------------------------------------

    def engine(self) -> str:
        self._model = Model.random(GEOMETRY, CHUNKS, seed=1)
        how = EngineConfig(io_threads=2, shutdown_timeout_s=2.0)
        source, target = ranks(self._model, "nhd", 2, filled=True), ranks(self._model, "hnd", 4, filled=False)
        writer = TransferEngine(self.store, namespace_of(), source, config=how)
        self._engines = writer, TransferEngine(self.store, namespace_of(), target, config=how), target
        return writer.digest.hex()

    def digest(self) -> str:
        """Of the namespace that the engines are in by now."""
        return str(self._engines[0].digest.hex())

    def reserve_pages(self, count: int) -> list[int]:
        """Slots of the engine's layout."""
        digest, layout = self._engines[0].digest, self._engines[0]._pages[0].mapping.slot
        handles = []
        for slot in self.store.reserve(digest, layout, count):
            self._number += 1
            self.slots[self._number] = slot
            handles.append(self._number)
        return handles

    def write_pages(self, handles: Sequence[int], numbers: Sequence[int]) -> None:
        """Writes chunks into slots as the engine does, from their pages."""
        writer = self._engines[0]
        records = b"".join(self.slots[h].chunk_record(k) for h, k in zip(handles, keys_of(numbers), strict=True))
        runner = JobRunner(threads=1, io_timeout_s=30.0, max_lost_threads=1, read_piece_bytes=1 << 20)
        ids = np.array(numbers, dtype=np.int64).reshape(-1, 1)
        runner.submit(1, STORE, [runner.part(p) for p in writer._pages], records, ids, writer.digest)
        while (outcome := runner.poll(STORE)) is None:
            time.sleep(0.001)
        assert not outcome.status.any()
        runner.shutdown(5.0)

    def save(self, numbers: Sequence[int]) -> list[bool]:
        """Stores chunks through the engine."""
        self._number += 1
        self._engines[0].submit_store(self._number, keys_of(numbers), list(numbers))
        return self._result(self._engines[0])

    def load(self, numbers: Sequence[int]) -> list[bool]:
        """Loads chunks through the engine: those that came are right in every byte, and no other byte was written."""
        _, reader, target = self._engines
        for mine in target:
            for tensor in mine.tensors:
                tensor[:] = POISON
        self._number += 1
        reader.submit_load(self._number, keys_of(numbers), list(numbers))
        bits = self._result(reader)
        assert self._model is not None
        expect_pages(self._model, "hnd", target, [k for k, bit in zip(numbers, bits, strict=True) if bit])
        return bits

    def _result(self, engine: Any) -> list[bool]:
        results = engine.wait([self._number], 30.0)
        return [bool(bit) for bit in results[self._number].bitmap]

    def loading(self, seed: int, seconds: float) -> dict[str, int]:
        """Loads at random."""
        draw = random.Random(seed)
        end = time.monotonic() + seconds
        counts = {"loads": 0, "hits": 0}
        while time.monotonic() < end:
            bits = self.load(draw.sample(range(CHUNKS), draw.randint(1, 12)))
            counts["loads"] += len(bits)
            counts["hits"] += sum(bits)
        return counts

    def saving(self, seed: int, seconds: float) -> dict[str, int]:
        """Stores at random."""
        draw = random.Random(seed)
        end = time.monotonic() + seconds
        counts = {"saves": 0, "saved": 0}
        while time.monotonic() < end:
            bits = self.save(draw.sample(range(CHUNKS), draw.randint(1, 12)))
            counts["saves"] += len(bits)
            counts["saved"] += sum(bits)
        return counts

    def both(self, seed: int, seconds: float) -> dict[str, int]:
        """Stores at random, in slots of another layout too."""
        end = time.monotonic() + seconds
        counts = {"saves": 0, "saved": 0}
        while (left := end - time.monotonic()) > 0:
            seed += 1
            for part in (self.saving(seed, min(0.1, left)), self.churn(seed, min(0.1, left), namespaces=[7])):
                counts = {name: count + part.get(name, 0) for name, count in counts.items()}
        return counts

    def gauges(self) -> dict[str, int]:
        """What is in use while no job is under way."""
        stats = self.store.stats()
        return {
            "held": stats.pinned_entries + stats.reserved_slots + stats.quarantined_slots,
            "leaked": sum(engine.stats()["leaked_bytes"] for engine in self._engines[:2]),
            "threads": len(os.listdir("/proc/self/task")), "descriptors": self.fds() - stats.slabs,
        }  # fmt: skip

    def shutdown(self) -> None:
        for engine in self._engines[:2]:
            engine.shutdown()


def own_leases(store: Store) -> list[LeaseRow]:
    """What this process has taken, as it knows it. With the table's lock."""
    return store._table.leases.own_rows()


def foreign_leases(store: Store) -> list[LeaseRow]:
    """What others have taken, as this one knows it."""
    return [*store._table.leases.foreign.values()]


def main() -> None:
    actor = Actor(Path(sys.argv[1]))
    for line in sys.stdin:
        verb, args, named = json.loads(line)
        work: Callable[..., Any] = getattr(actor, verb)
        try:
            answer = [True, work(*args, **named)]
        except (KvxferError, AssertionError) as exc:
            answer = [False, f"{type(exc).__name__}: {exc}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
