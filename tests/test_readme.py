"""The README's example runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def test_the_example_prints_what_the_readme_says() -> None:
    found = re.search(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code, expected = found.groups()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == expected


def test_the_demo_shown_is_the_demo_run() -> None:
    """Its view is in the README as it is printed, but for what differs between runs."""
    shown = re.search(r"```\n(llama-3\.1-8b: .*?)```", README, re.DOTALL)
    assert shown is not None
    for line in ("■ 28 prefix   × 1 lost   □ 11 beyond the gap", "0 wrong", "│       448 │          192 │"):
        assert line in shown[1]
