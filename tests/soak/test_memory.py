"""What memory a process keeps; and that it would be noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.memory import run as measured

MEMORY = "from tests.soak.memory import main; main()"
FORGETS = """
from kvxfer.jobs import JobRunner
JobRunner.kept, JobRunner.real = [], JobRunner.submit
JobRunner.submit = lambda self, *args, **named: (self.kept.append(bytes(300)), self.real(*args, **named))[1]
"""  # 300 bytes a job


@pytest.mark.slow
def test_nothing_is_kept_of_what_was_done(tmp_path: Path) -> None:
    good, text = measured(0.0, str(tmp_path))
    assert good, text


@pytest.mark.slow
def test_what_is_kept_is_noticed(tmp_path: Path) -> None:
    good, text = measured(0.0, str(tmp_path), FORGETS + MEMORY)
    assert not good
    assert "LOSS memory" in text, text
