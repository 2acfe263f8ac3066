"""What holds for the project as a whole: a light import, public names, docstrings, file sizes, test partition."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvxfer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "kvxfer").rglob("*.py"))
HEAVY = ("torch", "triton", "kvikio", "cupy", "vllm", "lmdb", "typer", "rich", "numpy")


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_takes_nothing_heavy_and_little_time() -> None:
    took, loaded = run_python(
        "import sys, time; start = time.process_time(); import kvxfer; print(time.process_time() - start);"
        "print(*(name for name in sys.modules if '.' not in name))"
    ).splitlines()
    assert not set(HEAVY) & set(loaded.split())
    assert float(took) < 3  # 0.3 s of a core is what is promised; a busy machine may be ten times as slow


def test_every_public_name_resolves_without_a_library_or_a_framework() -> None:
    loaded = run_python(
        "import sys, kvxfer; [getattr(kvxfer, name) for name in kvxfer.__all__];"
        "print(*(name for name in sys.modules if '.' not in name)); import kvxfer._native as native;"
        "print('loaded' if native.lib.cache_info().currsize else '')"
    )
    assert not {"torch", "triton", "kvikio", "cupy", "vllm", "loaded"} & set(loaded.split())


def test_public_names_are_sorted_and_have_a_home() -> None:
    assert kvxfer.__all__ == sorted(set(kvxfer.__all__))
    assert set(kvxfer.__all__) == {*kvxfer._HOME_OF, "__version__"}
    assert set(kvxfer.__all__) <= set(dir(kvxfer))
    for name, home in kvxfer._HOME_OF.items():
        assert getattr(kvxfer, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvxfer.nothing  # noqa: B018


def test_no_file_is_longer_than_500_lines() -> None:
    sources = [*PACKAGE, *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > 500} == {}


def public_definitions(tree: ast.Module) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public classes and functions of a module, and the methods of such classes."""
    queue: list[ast.stmt] = list(tree.body)
    for node in queue:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                queue += node.body


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bare = [node.name for node in public_definitions(tree) if not ast.get_docstring(node)]
    assert (bare, bool(tree.body) and not ast.get_docstring(tree)) == ([], False)


def test_only_declared_markers_are_used() -> None:
    """--strict-markers refuses the others; this holds that each declared one says what it parts."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert {line.split(":")[0] for line in declared} == {"gpu", "gds", "vllm", "slow"}


def test_what_a_wheel_needs_is_within_the_pinned_environment() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pinned["torch"] == "2.13.0"
    for requirement in project["dependencies"]:
        name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement).groups()  # type: ignore[union-attr]
        version = [int(part) for part in pinned[name].split(".")]
        assert [int(part) for part in low.split(".")] <= version < [int(part) for part in high.split(".")]
