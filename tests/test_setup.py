"""setup.py, on a project of one small source: what it builds, and what it says where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = '#include "kvx.h"\nuint32_t kvx_abi_version(void) { return KVX_ABI_VERSION; }\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """This project with one source instead of its own."""
    for name in (
        "setup.py",
        "pyproject.toml",
        "MANIFEST.in",
        "LICENSE",
        "README.md",
        "kvxfer/__init__.py",
        "csrc/kvx.h",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "csrc" / "abi.cpp").write_text(SOURCE)
    return tmp_path


def setup(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs setup.py; CXX, CXXFLAGS and KVXFER_SANITIZE are as given here, not as in this process."""
    kept = {name: value for name, value in os.environ.items() if name not in {"CXX", "CXXFLAGS", "KVXFER_SANITIZE"}}
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments],
        capture_output=True, text=True, cwd=project, env=kept | environment, timeout=100,
    )  # fmt: skip


def test_without_a_compiler_it_fails_and_names_what_is_missing(project: Path) -> None:
    done = setup(project, "build_ext", "--inplace", PATH=str(project))
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    assert all(word in message for word in ("C++17 compiler", "CXX", "g++, c++, clang++", "apt-get install g++"))
    assert not (project / "kvxfer" / "libkvx.so").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CXX": "no-such-compiler -O2"}, ["CXX='no-such-compiler -O2'", "not an installed compiler"]),
        ({"KVXFER_SANITIZE": "memory"}, ["KVXFER_SANITIZE='memory'", "1 (or address), thread, 0"]),
    ],
)
def test_a_setting_that_cannot_be_is_named(project: Path, environment: dict[str, str], words: list[str]) -> None:
    done = setup(project, "build_ext", "--inplace", **environment)
    assert done.returncode != 0
    assert not [word for word in words if word not in done.stderr.splitlines()[-1]]


def test_what_the_compiler_refuses_fails_the_build_with_its_words(project: Path) -> None:
    (project / "csrc" / "bad.cpp").write_text("int number = text;\n")
    done = setup(project, "build_ext", "--inplace")
    assert done.returncode != 0
    assert "bad.cpp:1" in done.stdout
    assert "-c csrc/bad.cpp" in done.stderr


def test_only_what_changed_is_compiled_again(project: Path) -> None:
    (project / "csrc" / "other.cpp").write_text("int unused_here = 1;\n")
    assert setup(project, "build_ext", "--inplace").returncode == 0
    objects = {path.name: path for path in (project / "build").rglob("*.o")}
    assert set(objects) == {"abi.o", "other.o"}
    before = {name: path.stat().st_mtime_ns for name, path in objects.items()}

    def rebuilt() -> set[str]:
        assert setup(project, "build_ext", "--inplace").returncode == 0
        return {name for name, path in objects.items() if path.stat().st_mtime_ns != before[name]}

    assert rebuilt() == set()
    (project / "csrc" / "other.cpp").write_text("int unused_here = 2;\n")
    assert rebuilt() == {"other.o"}
    (project / "csrc" / "kvx.h").touch()
    assert rebuilt() == {"abi.o", "other.o"}


def test_one_wheel_serves_every_python_3(project: Path) -> None:
    done = setup(project, "bdist_wheel", "--dist-dir", "dist")
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "dist").iterdir()
    assert wheel.name.startswith("kvxfer-")
    assert "-py3-none-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvxfer/libkvx.so" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert not [name for name in names if name.startswith("csrc")]


def test_a_source_distribution_carries_sources_and_headers(project: Path) -> None:
    done = setup(project, "sdist", "--formats", "zip", "--dist-dir", "dist")
    assert done.returncode == 0, done.stderr
    (archive,) = (project / "dist").iterdir()
    names = {name.split("/", 1)[1] for name in zipfile.ZipFile(archive).namelist()}
    assert {"csrc/abi.cpp", "csrc/kvx.h", "setup.py", "pyproject.toml", "LICENSE"} <= names
