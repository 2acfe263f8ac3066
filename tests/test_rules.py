"""docs/rules.md says which tests hold which rule: they exist, and no rule is without."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "rules.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
RULES = [f"R{number}" for number in range(1, 15)]


def rules(text: str) -> dict[str, list[str]]:
    """The rows of each rule's table, without its head."""
    parts = re.split(r"^## (R\d+): .+$", text, flags=re.MULTILINE)
    return {
        rule: [line for line in body.splitlines() if line.startswith("|")][2:]
        for rule, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@cache
def names_in(path: Path) -> frozenset[str]:
    """The functions of a file, and what it assigns: a state machine's TestCase has its name from that."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return frozenset(names)


def faults(text: str) -> list[str]:
    """What is wrong with a document of this form."""
    found = rules(text)
    out = [] if list(found) == RULES else [f"rules {list(found)}"]
    for rule, rows in found.items():
        if not any(NAMED.search(row) for row in rows if "| not yet: " not in row):
            out.append(f"{rule}: no test")
        for row in rows:
            cells = row.strip("|").split("|")
            held = cells[1].strip() if len(cells) == 2 else ""
            named = NAMED.findall(held)
            if not named and not held.startswith("not yet: "):
                out.append(f"{rule}: {row}")
            for file, name in named:
                path = TESTS / file
                if not name.lower().startswith("test") or not path.is_file() or name not in names_in(path):
                    out.append(f"{rule}: {file}::{name} does not exist")
            if held.count(".py::") != len(named):
                out.append(f"{rule}: a name is not in the form that is looked for: {row}")
    return out


def test_every_rule_is_held_by_tests_that_exist() -> None:
    assert faults(DOCUMENT.read_text()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("::test_any_flipped_bit_is_seen`", "::test_gone`"), "R1: properties/test_slots.py::test_gone does not exist"),
        (("`properties/test_slots.py::", "`properties/gone.py::"), "properties/gone.py::"),
        (
            (
                "`engine/test_rule_cases.py::test_an_exception_in_what_gives_slots_and_pins_back_costs_no_result`",
                "some day",
            ),
            "R5: | an exception while slots",
        ),
        (("## R5: ", "## R15: "), "rules ["),
        (("`jobs/test_trips.py::test_damage", "jobs/test_trips.py::test_damage"), "not in the form"),
    ],
)
def test_what_is_wrong_is_found(change: tuple[str, str], message: str) -> None:
    found = faults(DOCUMENT.read_text().replace(*change))
    assert any(message in fault for fault in found), found


def test_a_rule_without_a_test_is_found() -> None:
    text = re.sub(
        r"^(\| .* \| ).*test_large_offsets.*$|^(\| .* \| ).*beyond_4_gib_of_their.*$",
        r"\1\2not yet: x |",
        DOCUMENT.read_text(),
        flags=re.MULTILINE,
    )
    assert faults(text) == ["R14: no test"]
