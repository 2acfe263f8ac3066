"""How many examples a property is tried with: few in every run, EXAMPLES times as many where that is asked for."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("EXAMPLES", "1"))


def examples(few: int) -> int:
    """For hypothesis' `max_examples`. `make test-slow` asks for more."""
    return few * TIMES
