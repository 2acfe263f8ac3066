"""What an operator does beside a storm: gc, quota, scrub, reset, each a command of its own, some of them killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
HANG_S = 120.0  # for a command, however slow the machine: only ever reached by a defect
ROOM = 3 << 20  # of a quota: half of what a storm's root has


class Housekeeping:
    """One command at a time on a root. Commands end with 0, or by the SIGKILL that they were given."""

    def __init__(self, root: Path, draw: random.Random, counts: Counter[str]) -> None:
        self.root, self.draw, self.counts = root, draw, counts
        self._process: subprocess.Popen[str] | None = None
        self._words: list[str] = []
        self._since, self._kill_at = 0.0, float("inf")

    @property
    def is_free(self) -> bool:
        """Whether none runs."""
        return self._process is None

    def begin(self, digest: str) -> None:
        """Another one. digest: of the namespace that it may be about."""
        self._begin(self._choose(digest), self.draw.random() < 0.2)

    def look(self) -> None:
        """Looks at the one that runs.

        Raises:
            AssertionError: it failed, or does not end.
        """
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._end()
        elif time.monotonic() >= self._kill_at:
            self._process.kill()
            self._kill_at = float("inf")
            self.counts["kills"] += 1
            self.counts["commands killed"] += 1
        else:
            assert time.monotonic() - self._since < HANG_S, f"{self._words} does not end"

    def rest(self) -> None:
        """Waits for the one that runs; no quota is left."""
        if self._process is not None:
            self._end()
        self._begin(["quota", "--json"])
        for digest in json.loads(self._end())["quotas"]:
            self._begin(["quota", "--namespace", digest, "--clear", "--yes"])
            self._end()

    def stop(self) -> None:
        """Ends it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _choose(self, digest: str) -> list[str]:
        quota = ["quota", "--namespace", digest, "--yes"]
        return self.draw.choice([
            ["scrub", "--rate", "200MB/s"], ["scrub"], ["verify"], ["inspect"], ["reset", "--yes"],
            ["gc", "--yes"], ["gc", "--namespace", digest, "--yes"], ["gc", "--unused-for", "0s", "--yes"],
            [*quota, "--at-most", str(ROOM)], [*quota, "--at-least", str(ROOM)], [*quota, "--clear"],
        ])  # fmt: skip

    def _begin(self, words: list[str], doomed: bool = False) -> None:
        self._words = words
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.cli", words[0], str(self.root), *words[1:]], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=CHECKOUT,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        )  # fmt: skip
        self._since = time.monotonic()
        self._kill_at = self._since + self.draw.uniform(0.0, 3.0) if doomed else float("inf")

    def _end(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        text, _ = process.communicate(timeout=HANG_S)
        if process.returncode == -signal.SIGKILL:
            return ""
        # The namespace that was named may have been reset, or collected, since.
        fine = process.returncode == 0 or (process.returncode == 2 and "begin like that; one must" in text)
        assert fine, f"kvxfer {' '.join(self._words)} ended with {process.returncode}: {text[-3000:]}"
        self.counts["commands"] += 1
        return text
