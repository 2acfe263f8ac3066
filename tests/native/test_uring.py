"""Whether io_uring works is found out by trying, and said why not; each refusal that a kernel can make is made here."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.testing import FaultyIO
from tests.native.uring import UNIT, needs_uring, try_uring


@pytest.fixture(autouse=True)
def _works(tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_uring(tmp_path_factory.getbasetemp())


@pytest.fixture
def io() -> Iterator[FaultyIO]:
    with FaultyIO() as faults:
        yield faults


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the listing's own
            continue
    return sorted(found)


@pytest.mark.parametrize("direct", [False, True])
def test_it_works_and_leaves_nothing(tmp_path: Path, direct: bool) -> None:
    before = descriptors()
    assert try_uring(tmp_path / "f", direct=direct) == (0, "")
    assert descriptors() == before


@pytest.mark.parametrize("nbytes", [0, 4095])
def test_a_size_that_is_none_is_refused(tmp_path: Path, nbytes: int) -> None:
    answer, why = try_uring(tmp_path / "f", nbytes)
    assert answer == -errno.EINVAL and "Errno 22" in why


@pytest.mark.parametrize(
    "code, says", [(errno.ENOSYS, "the kernel has no"), (errno.EPERM, "container"), (errno.ENOMEM, "RLIMIT_MEMLOCK")]
)
def test_a_kernel_that_makes_no_ring(tmp_path: Path, io: FaultyIO, code: int, says: str) -> None:
    before = descriptors()
    rule = io.fail("uring_setup", code)
    answer, why = try_uring(tmp_path / "f")
    assert answer == -code and says in why and f"Errno {code}" in why and "io_uring_setup" in why
    assert rule.hits == 1 and descriptors() == before


def test_a_kernel_that_does_not_say_what_it_can_do(tmp_path: Path, io: FaultyIO) -> None:
    before = descriptors()
    io.fail("uring_register", errno.EINVAL, times=1)
    answer, why = try_uring(tmp_path / "f")
    assert answer == -errno.EINVAL and "does not say what it can do" in why
    assert descriptors() == before


@pytest.mark.parametrize("known, lacks", [(1, 1), (2, 2), (4, 4), (5, 5)])
def test_a_kernel_that_lacks_an_operation(tmp_path: Path, io: FaultyIO, known: int, lacks: int) -> None:
    io.short("uring_register", known, times=1)
    assert try_uring(tmp_path / "f") == (-errno.EOPNOTSUPP, f"the kernel's io_uring lacks operation {lacks}")


def test_what_cannot_be_registered_is_said_and_done_without(tmp_path: Path, io: FaultyIO) -> None:
    io.fail("uring_register", errno.EMFILE, after=1, times=1)
    answer, why = try_uring(tmp_path / "f")
    assert answer == 0 and why.startswith("files are not registered: [Errno 24]")
    io.fail("uring_register", errno.ENOMEM, after=2, times=1)
    answer, why = try_uring(tmp_path / "f")
    assert answer == 0 and why.startswith("buffers are not registered: [Errno 12]")


def test_a_submission_that_is_refused(tmp_path: Path, io: FaultyIO) -> None:
    io.fail("uring_submit", errno.EPERM)
    answer, why = try_uring(tmp_path / "f")
    assert answer == -errno.EIO and "io_uring_enter was refused" in why


@pytest.mark.parametrize("after, what", [(0, "a write"), (4, "a read")])
def test_a_request_that_fails(tmp_path: Path, io: FaultyIO, after: int, what: str) -> None:
    io.fail("uring_complete", errno.EIO, after=after, times=1)
    answer, why = try_uring(tmp_path / "f")
    assert answer == -errno.EIO and why.startswith(f"{what}: [Errno 5]")


def test_wrong_bytes_are_noticed(tmp_path: Path, io: FaultyIO) -> None:
    rule = io.flip(UNIT - 1, op="uring_complete", after=4, times=1)
    answer, why = try_uring(tmp_path / "f")
    assert answer == -errno.EIO and "a read gave other bytes" in why and rule.hits == 1
    io.flip(7, op="pread", after=4, times=1)  # the one that is no ring's: it sees what a write left
    answer, why = try_uring(tmp_path / "f")
    assert answer == -errno.EIO and "a write left other bytes" in why


def test_a_library_that_was_built_without_the_kernels_header_refuses_with_that_reason(tmp_path: Path) -> None:
    """ring.cpp alone is built so, into a program that asks it for a ring."""
    sources = Path(__file__).parents[2] / "csrc"
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include <cstdio>\n#include "ring.h"\n'
        "int main() { int error = 0; std::string why; auto ring = kvx::Ring::make(8, &error, &why);\n"
        '  std::printf("%d %d %s", ring != nullptr, error, why.c_str()); }\n'
    )
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    command = [*compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-DKVX_NO_URING", f"-I{sources}"]
    built = subprocess.run(
        [*command, str(main), str(sources / "ring.cpp"), "-o", str(tmp_path / "main")], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    said = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True).stdout
    assert said == f"0 {-errno.ENOSYS} this libkvx was built without <linux/io_uring.h>"
