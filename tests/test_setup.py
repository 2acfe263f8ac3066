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
    """Runs setup.py; its settings are as given here, not as in this process."""
    settings = {"CXX", "CXXFLAGS", "KVXFER_SANITIZE", "KVXFER_CUDA", "NVCC", "NVCCFLAGS", "CUDA_HOME", "CUDA_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in settings}
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


# ---- libkvx_cuda

NVCC = """#!/bin/sh
echo "$@" >> nvcc-calls
case "$1" in --fail) echo "no such thing"; exit 7;; --nothing) exit 0;; esac
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def nvcc(project: Path) -> str:
    """A compiler that notes what it was asked, for a project that has something for it."""
    (project / "csrc" / "cuda").mkdir()
    (project / "csrc" / "cuda" / "cuda_batch.cu").write_text("")
    (project / "csrc" / "cuda" / "cuda_batch.h").write_text("")
    (project / "nvcc").write_text(NVCC)
    (project / "nvcc").chmod(0o755)
    return str(project / "nvcc")


def asked(project: Path) -> list[str]:
    calls = project / "nvcc-calls"
    return calls.read_text().splitlines() if calls.exists() else []


def built(project: Path) -> tuple[bool, bool]:
    return (project / "kvxfer" / "libkvx.so").exists(), (project / "kvxfer" / "libkvx_cuda.so").exists()


def test_the_cuda_library_is_built_where_nvcc_is_and_not_each_time(project: Path, nvcc: str) -> None:
    for times, touched in ((1, None), (1, None), (2, "cuda_batch.cu"), (3, "cuda_batch.h")):
        if touched:
            (project / "csrc" / "cuda" / touched).touch()
        (project / "kvxfer" / "libkvx_cuda.so").unlink(missing_ok=True)
        done = setup(project, "build_ext", "--inplace", NVCC=nvcc, NVCCFLAGS="--this")
        assert (done.returncode, done.stdout, built(project)) == (0, "", (True, True))
        assert len(asked(project)) == times
    assert "-shared -cudart static" in asked(project)[0]
    assert "--this csrc/cuda/cuda_batch.cu -o" in asked(project)[0]
    assert setup(project, "build_ext", "--inplace", NVCC=nvcc).returncode == 0  # other arguments
    assert len(asked(project)) == 4


def test_nvcc_is_looked_for_where_cuda_is(project: Path, nvcc: str) -> None:
    (project / "home" / "bin").mkdir(parents=True)
    shutil.move(nvcc, project / "home" / "bin" / "nvcc")
    path = os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "nvcc").exists()
    )
    done = setup(project, "build_ext", "--inplace", CUDA_HOME=str(project / "home"), PATH=path)
    assert (done.returncode, built(project), len(asked(project))) == (0, (True, True), 1)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"KVXFER_CUDA": "0"}, ["KVXFER_CUDA=0"]),
        ({"KVXFER_SANITIZE": "1"}, ["sanitizers are for libkvx"]),
        ({"NVCC": "no-such-nvcc -O2"}, ["NVCC='no-such-nvcc -O2' is not installed"]),
        ({"NVCC": "{nvcc} --fail"}, ["exit status 7 from: ", "--fail -shared", "no such thing"]),
        ({"NVCC": "{nvcc} --nothing"}, ["exit status 0 from: "]),
        ({"NVCC": "{nvcc} 'open"}, ["NVCC=", "'open", "No closing quotation"]),
        ({"NVCCFLAGS": "-O1 'open"}, ["NVCCFLAGS=", "'open", "No closing quotation"]),
    ],
)
def test_whatever_is_wrong_with_nvcc_is_said_and_the_rest_is_built(
    project: Path, nvcc: str, environment: dict[str, str], words: list[str]
) -> None:
    environment = {name: value.format(nvcc=nvcc) for name, value in environment.items()}
    done = setup(project, "build_ext", "--inplace", **{"NVCC": nvcc} | environment)
    assert (done.returncode, built(project)) == (0, (True, False)), done.stderr
    assert done.stdout.startswith("libkvx_cuda is not built: ")
    assert not [word for word in words if word not in done.stdout]


def test_a_cuda_setting_that_cannot_be_is_named(project: Path, nvcc: str) -> None:
    done = setup(project, "build_ext", "--inplace", NVCC=nvcc, KVXFER_CUDA="yes")
    assert done.returncode != 0
    assert "KVXFER_CUDA='yes' is unknown; allowed are 1, 0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("works", [True, False])
def test_the_wheel_has_the_cuda_library_if_it_was_built(project: Path, nvcc: str, works: bool) -> None:
    done = setup(project, "bdist_wheel", "--dist-dir", "dist", NVCC=nvcc if works else f"{nvcc} --fail")
    assert done.returncode == 0, done.stderr
    (wheel,) = (project / "dist").iterdir()
    assert "-py3-none-linux_" in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert ("kvxfer/libkvx_cuda.so" in names) == works
    assert "kvxfer/libkvx.so" in names


def test_a_source_distribution_carries_the_cuda_sources(project: Path, nvcc: str) -> None:
    done = setup(project, "sdist", "--formats", "zip", "--dist-dir", "dist", NVCC=nvcc)
    assert done.returncode == 0, done.stderr
    (archive,) = (project / "dist").iterdir()
    names = {name.split("/", 1)[1] for name in zipfile.ZipFile(archive).namelist()}
    assert {"csrc/cuda/cuda_batch.cu", "csrc/cuda/cuda_batch.h"} <= names


def test_a_wheel_has_no_cuda_library_of_an_earlier_build(project: Path, nvcc: str) -> None:
    for settings in ({}, {"KVXFER_CUDA": "0"}):
        done = setup(project, "bdist_wheel", "--dist-dir", f"dist{len(settings)}", NVCC=nvcc, **settings)
        assert done.returncode == 0, done.stderr
    (wheel,) = (project / "dist1").iterdir()
    assert "kvxfer/libkvx_cuda.so" not in zipfile.ZipFile(wheel).namelist()
