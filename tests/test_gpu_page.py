"""docs/gpu.md says on which proof each claim about the GPU path rests: one of four, and by a test that exists."""

from __future__ import annotations

import re

import pytest

from tests.test_rules import NAMED, TESTS, names_in

DOCUMENT = TESTS.parent / "docs" / "gpu.md"
PROOFS = ("interpreter", "offline compile", "doubles", "a GPU")


def faults(text: str) -> list[str]:
    """What is wrong with the tables of claims."""
    out: list[str] = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, *lines = section.splitlines()
        rows = [line.strip("|").split("|") for line in lines if line.startswith("|")][2:]
        if not rows:
            out.append(f"{title}: no claim")
        for claim, proof, held in (row for row in rows if len(row) == 3):
            named = NAMED.findall(held)
            if proof.strip() not in PROOFS:
                out.append(f"{claim.strip()}: {proof.strip()} is no proof")
            if not named and held.strip() not in ("`make kernels`", "not measured"):
                out.append(f"{claim.strip()}: held by nothing")
            if held.count(".py::") != len(named):
                out.append(f"{claim.strip()}: a name is not in the form that is looked for")
            for file, name in named:
                if not (TESTS / file).is_file() or name not in names_in(TESTS / file):
                    out.append(f"{claim.strip()}: {file}::{name} does not exist")
        out += [f"{title}: a row of {len(row)} cells" for row in rows if len(row) != 3]
    return out


def test_every_claim_names_its_proof_and_a_test_that_exists() -> None:
    assert faults(DOCUMENT.read_text()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("::test_blocks_and_rows_beyond_4_gib`", "::test_gone`"), "test_rows_triton.py::test_gone does not exist"),
        (("| interpreter | `convert/test_rows.py", "| hope | `convert/test_rows.py"), "hope is no proof"),
        (("| not measured |", "| soon |"), "held by nothing"),
        (
            ("`convert/test_large_offsets.py::test_blocks", "convert/test_large_offsets.py::test_blocks"),
            "not in the form",
        ),
        (("| offline compile | `make kernels` |", "| offline compile |"), "a row of 2 cells"),
    ],
)
def test_what_is_wrong_is_found(change: tuple[str, str], message: str) -> None:
    text = DOCUMENT.read_text()
    assert change[0] in text
    found = faults(text.replace(*change))
    assert any(message in fault for fault in found), found
