"""engine_child's process with KvxferConnector: how the drive is damaged, and what is found there.

Steps beside Child's: damage HOW NUMBERS (of the prompt's chunks: zero, flip, flip late, swap), delete NUMBERS, hang
CALL (one such call does not return), fail CALL ERRNO, kill CALL (this process, at the sixth), release (ends these),
reset (vLLM's prefix cache and the connector's), nap SECONDS, settle (until nothing is under way), usage.
"""

from __future__ import annotations

import os
import time
from typing import Any

from kvxfer.testing import FaultyIO
from tests.integrations.engine_child import PROMPT_TOKENS, Child


class ConnectorChild(Child):
    """With KvxferConnector, whichever ranks it has."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.connector = self.scheduler.connector
        self.manager = self.connector.connector_scheduler.manager
        self.coordinator = self.manager._coordinator
        self.stores = self.manager._roots.stores
        self.chain: list[bytes] = []  # the prompt's keys, in order
        self._look_up, self.manager.lookup = self.manager.lookup, self.lookup
        self._seen: list[bytes] = []

    def lookup(self, key: bytes, context: Any) -> Any:
        """Listens: a prompt's lookups go along its chain."""
        if key not in self._seen:
            self._seen.append(key)
        return self._look_up(key, context)

    def run(self, seed: int = 0, tokens: int = PROMPT_TOKENS, more: int = 8) -> dict[str, Any]:
        self._seen = []
        result = super().run(seed, tokens, more)
        if seed == 0 and len(self._seen) > len(self.chain):
            self.chain = self._seen[:12]
        return result

    def fill(self) -> dict[str, Any]:
        """Every store of the prompt is on the drive after this."""
        super().fill()
        self.settle()
        return {"entries": sum(store.stats().entries for store in self.stores)}

    def settle(self) -> dict[str, Any]:
        """vLLM steps only when it has requests: until nothing is under way but the last one's."""
        end = time.monotonic() + 120
        while self.coordinator.is_busy and time.monotonic() < end:
            self.llm.llm_engine.step()
        return {"busy": self.coordinator.is_busy}

    def locate(self, number: int) -> Any:
        """Where a chunk of the prompt is, in whichever root."""
        both = [(store, digest) for store in self.stores for digest in self.coordinator.digests]
        return next(found for store, digest in both if (found := store.locate(digest, self.chain[number])) is not None)

    def damage(self, how: str, numbers: list[int]) -> dict[str, Any]:
        for number in numbers:
            path, offset, layout = self.locate(number)
            size = layout.slot_bytes
            with path.open("r+b") as file:
                old = os.pread(file.fileno(), size, offset)
                if how == "swap":  # with the next chunk's slot
                    other, elsewhere, _ = self.locate(number + 1)
                    with other.open("r+b") as neighbour:
                        new = os.pread(neighbour.fileno(), size, elsewhere)
                        os.pwrite(neighbour.fileno(), old, elsewhere)
                        os.fsync(neighbour.fileno())
                else:
                    at = (
                        size // 3 if how == "flip" else 2 * size // 3
                    )  # "flip late": another rank's, where there are two
                    new = bytes(size) if how == "zero" else old[:at] + bytes([old[at] ^ 1]) + old[at + 1 :]
                os.pwrite(file.fileno(), new, offset)
                os.fsync(file.fileno())
        return {}

    def delete(self, numbers: list[int]) -> dict[str, Any]:
        """Evicted, as far as anybody can tell."""
        entries = self.stores[0].pin(self.coordinator.digest, [self.chain[number] for number in numbers])
        self.stores[0].unpin(entries)
        return {"gone": [self.stores[0].invalidate(entry, "other") for entry in entries]}

    def hang(self, call: str = "pread") -> dict[str, Any]:
        FaultyIO().hang(call, after=3, times=1, offset=(4096, 1 << 40))
        return {}

    def fail(self, call: str, errno: int) -> dict[str, Any]:
        FaultyIO().fail(call, errno, offset=(4096, 1 << 40))
        return {}

    def kill(self, call: str) -> dict[str, Any]:
        FaultyIO().kill(call, after=5, offset=(4096, 1 << 40))
        return {}

    def nap(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        return {}

    def usage(self) -> dict[str, Any]:
        each = [store.stats() for store in self.stores]
        return {
            "entries": sum(stats.entries for stats in each),
            "below": all(stats.disk_bytes <= stats.capacity_bytes for stats in each),
            "evicted": sum(sum(stats.evictions.values()) for stats in each),
            "pinned": sum(stats.pinned_entries for stats in each),
            "pace": self.manager.pace.tokens_per_s,
        }

    def release(self) -> dict[str, Any]:
        FaultyIO().__exit__(None, None, None)
        return {}

    def reset(self) -> dict[str, Any]:
        return {"reset": bool(self.llm.reset_prefix_cache(reset_connector=True))}
