"""How fast a server computes prefixes, as seen from outside: what a load's deadline is measured against.

A load is worth waiting for as long as recomputing would take, and no longer. Where nobody gives the rate, it is taken
from what the server did lately.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Pace"]

SAMPLES = 64  # what was seen lately: some minutes of a busy server's prefills
ENOUGH = 3  # samples until there is an estimate: the first steps of a process warm up and are slow
LARGE = 4  # a sample says something about prefills if it has at least 1/LARGE of the most tokens lately
QUANTILE = 0.9  # of the tokens: an estimate on the fast side, so that no load is waited for longer than it saves


class Pace:
    """An estimate of the rate at which tokens are computed. Not thread-safe: it is its caller's.

    Small samples are passed over once large ones were seen: a step that decodes one token for each of its requests says
    nothing of how long a prefix would take.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES)  # (tokens per second, tokens)
        self._rate: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds. Ignored: what cannot be, what is small beside the others."""
        if tokens < 1 or not seconds > 0:
            return
        most = max((seen for _, seen in self._samples), default=0)
        if tokens * LARGE < most:
            return
        if tokens > most * LARGE:  # what was there were no prefills
            self._samples.clear()
        self._samples.append((tokens / seconds, tokens))
        self._rate = self._estimate() if len(self._samples) >= ENOUGH else None

    @property
    def tokens_per_s(self) -> float | None:
        """The rate that 90 % of the tokens lately seen did not exceed; None before a few samples."""
        return self._rate

    def _estimate(self) -> float:
        ordered = sorted(self._samples)
        left = QUANTILE * sum(tokens for _, tokens in ordered)
        for rate, tokens in ordered:
            left -= tokens
            if left <= 0:
                return rate
        return ordered[-1][0]
