"""What NVMe drives say of their wear, over a double of the admin command: no drive has answered it yet."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import drive_wear
from kvxfer.drive_wear import DriveWear, Wear, ask_wear, drives_under, read_logs
from tests import nvme_double
from tests.nvme_double import GUID, INVALID_LOG_PAGE, OCP, SMART, Command, fill, page
from tests.test_topology import Tree

WELL = {"critical_warning": 0, "available_spare": 100, "spare_threshold": 10, "percentage_used": 3}
HOST = page(SMART, units_written=2_000_000, media_errors=7, **WELL)
MEDIA = page(OCP, media_written=1_280_000_000_000, guid=GUID)
SAID = {
    "host_written_bytes": 2_000_000 * 512_000, "media_written_bytes": 1_280_000_000_000, "percentage_used": 3,
    "available_spare": 100, "spare_threshold": 10, "media_errors": 7, "critical_warning": 0, "why": "",
}  # fmt: skip

Answers = Callable[[int, bytearray], int]
Asked = Callable[[Answers], dict[str, Any]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What read_logs says where the kernel answers a page's number and a command like this."""
    node = tmp_path / "nvme0"
    node.touch()

    def ask(answers: Answers) -> dict[str, Any]:
        def ioctl(fd: int, request: int, command: bytearray, mutate: bool) -> int:
            assert os.path.samestat(os.fstat(fd), os.stat(node)) and mutate
            return answers(Command.from_buffer(command).cdw10 & 0xFF, command)

        monkeypatch.setattr("fcntl.ioctl", ioctl)
        return read_logs(str(node))

    return ask


def pages(**by_number: bytes) -> Answers:
    """Drives that have these pages, by number in hex with an x before it; no other."""

    def answer(number: int, command: bytearray) -> int:
        if (body := by_number.get(f"x{number:02x}")) is None:
            return INVALID_LOG_PAGE
        fill(command, body)
        return 0

    return answer


def failing(number: int, code: int) -> Answers:
    """A drive that is well, but for this page."""

    def answer(asked_for: int, command: bytearray) -> int:
        if asked_for == number:
            raise OSError(code, os.strerror(code))
        return pages(x02=HOST, xc0=MEDIA)(asked_for, command)

    return answer


def test_a_drive_with_both_pages(asked: Asked) -> None:
    said = asked(pages(x02=HOST, xc0=MEDIA))
    assert said == SAID
    wear = DriveWear(controller="nvme0", **said)
    assert wear.amplification == 1.25
    assert Wear(drives=(wear,)).as_json()["amplification"] == 1.25


def test_the_command_is_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, dict[str, int]]] = []

    def ioctl(fd: int, request: int, command: bytearray, mutate: bool) -> int:
        fields = Command.from_buffer(command)
        seen.append((request, {name: getattr(fields, name) for name, _ in Command._fields_}))
        return pages(x02=HOST, xc0=MEDIA)(fields.cdw10 & 0xFF, command)

    monkeypatch.setattr("fcntl.ioctl", ioctl)
    (tmp_path / "nvme0").touch()
    read_logs(str(tmp_path / "nvme0"))
    assert [request for request, _ in seen] == [0xC0484E41] * 2, "_IOWR('N', 0x41, 72 bytes)"
    for number, (_, fields) in zip((0x02, 0xC0), seen, strict=True):
        assert fields.pop("addr") % 4 == 0
        # GET LOG PAGE, of all namespaces: 128 dwords, less one. The kernel's own time limit: a shorter one may reset.
        assert {name: value for name, value in fields.items() if value} == {
            "opcode": 0x02, "nsid": 0xFFFFFFFF, "data_len": 512, "cdw10": 127 << 16 | number,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (pages(x02=HOST), "the drive gives no log page C0h (status 0x109)"),
        (pages(x02=HOST, xc0=page(OCP, media_written=9, guid=GUID ^ 1)), "its log page C0h is not OCP's"),
        (pages(x02=HOST, xc0=b"\xff" * 512), "its log page C0h is not OCP's"),
        (pages(x02=HOST, xc0=bytes(512)), "its log page C0h is not OCP's"),
        (pages(x02=HOST, xc0=MEDIA[:495]), "its log page C0h is not OCP's"),
        (pages(x02=HOST, xc0=page(OCP, media_written=1 << 70, guid=GUID)), "its log page C0h makes no sense"),
        (failing(0xC0, errno.EIO), "Input/output error"),
    ],
)
def test_a_drive_that_does_not_tell_what_it_writes_inside(asked: Asked, answers: Answers, why: str) -> None:
    said = asked(answers)
    assert said.pop("why").startswith("what it writes inside is not known: ")
    assert why in asked(answers)["why"]
    assert said == {name: value for name, value in SAID.items() if name not in ("why", "media_written_bytes")}
    assert DriveWear(controller="nvme0", **said).amplification is None


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (failing(0x02, errno.EACCES), "answers root alone (CAP_SYS_ADMIN)"),
        (failing(0x02, errno.EPERM), "answers root alone (CAP_SYS_ADMIN)"),
        (failing(0x02, errno.ENOTTY), "is no NVMe controller"),
        (failing(0x02, errno.EIO), "Input/output error"),
        (failing(0x02, errno.ENODEV), "No such device"),
        (pages(xc0=MEDIA), "the drive gives no log page 02h (status 0x109)"),
        (pages(x02=b"\xff" * 512, xc0=MEDIA), "its log page 02h makes no sense"),
        (pages(x02=bytes(512), xc0=MEDIA), "its log page 02h makes no sense"),
        (pages(x02=b"", xc0=MEDIA), "its log page 02h makes no sense"),
        (pages(x02=HOST[:63], xc0=MEDIA), "its log page 02h makes no sense"),
        (pages(x02=page(SMART, units_written=1, **WELL | {"available_spare": 101})), "makes no sense"),
        (pages(x02=page(SMART, units_written=1, **WELL | {"spare_threshold": 101})), "makes no sense"),
        (pages(x02=page(SMART, units_written=1 << 64, **WELL)), "makes no sense"),
    ],
)
def test_a_drive_that_tells_nothing(asked: Asked, answers: Answers, why: str) -> None:
    said = asked(answers)
    assert said.keys() == {"why"} and why in said["why"]


def test_a_drive_that_is_not_there(tmp_path: Path) -> None:
    assert read_logs(str(tmp_path / "nvme0"))["why"].startswith(f"there is no {tmp_path}/nvme0 here")
    assert "is no NVMe controller" in read_logs(os.devnull)["why"], "by the kernel's own word"


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_whatever_the_pages_hold(tmp_path_factory: pytest.TempPathFactory, first: bytes, second: bytes) -> None:
    node = tmp_path_factory.mktemp("dev") / "nvme0"
    node.touch()
    answers = pages(x02=first[:512], xc0=second[:512])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "fcntl.ioctl",
            lambda fd, request, command, mutate: answers(Command.from_buffer(command).cdw10 & 0xFF, command),
        )
        said = read_logs(str(node))
    DriveWear(controller="nvme0", **said)
    assert said["why"], "a GUID of 16 bytes is not found by chance"
    assert said.get("host_written_bytes", 0) < 1 << 70


def test_drives_of_all_ages() -> None:
    used_up = drive_wear.smart(page(SMART, units_written=0, **WELL | {"percentage_used": 255}))
    assert (used_up["percentage_used"], used_up["host_written_bytes"]) == (255, 0)
    assert DriveWear(controller="nvme0", media_written_bytes=5, host_written_bytes=0).amplification is None
    assert drive_wear.warnings(0) == []
    assert drive_wear.warnings(0b1001) == ["the spare is below its threshold", "its media are read-only"]
    assert drive_wear.warnings(0b1100_0000) == ["warning 0xc0"]


# ---- which drives there are --------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


def under(tree: Tree, number: str) -> tuple[list[str], str]:
    major, minor = map(int, number.split(":"))
    wear = drives_under(Path("/"), tree.root, (major, minor))
    return [drive.controller for drive in wear.drives], wear.why


def test_through_a_partition_a_volume_and_a_raid(tree: Tree) -> None:
    first, second = tree.nvme(0), tree.nvme(1)
    part = tree.block(first / "nvme0n1p2", "259:20")
    (part / "partition").write_text("2\n")
    raid = tree.block(tree.root / "devices" / "virtual" / "block" / "md0", "9:0", (part, second))
    tree.block(tree.root / "devices" / "virtual" / "block" / "dm-0", "253:0", (raid,))
    assert under(tree, "259:20") == (["nvme0"], "")
    assert under(tree, "9:0") == under(tree, "253:0") == (["nvme0", "nvme1"], "")


def test_two_namespaces_of_one_drive_are_one_drive(tree: Tree) -> None:
    first = tree.nvme(0)
    second = tree.block(first.parent / "nvme0n2", "259:7")
    tree.block(tree.root / "devices" / "virtual" / "block" / "dm-0", "253:0", (first, second))
    assert under(tree, "253:0") == (["nvme0"], "")


def test_a_drive_behind_controllers_of_a_subsystem(tree: Tree) -> None:
    subsystem = tree.root / "devices" / "virtual" / "nvme-subsystem" / "nvme-subsys0"
    for index in range(2):
        controller = tree.pci(f"0000:0{index + 1}:00.0", 1) / "nvme" / f"nvme{index}"
        controller.mkdir(parents=True)
        subsystem.mkdir(parents=True, exist_ok=True)
        (subsystem / f"nvme{index}").symlink_to(controller)
    tree.block(subsystem / "nvme0n1", "259:0")
    assert under(tree, "259:0") == ([], "nvme0n1 has several controllers: which of them counts what is not known")
    (subsystem / "nvme0").unlink()
    assert under(tree, "259:0") == (["nvme1"], "")


def test_other_disks_are_named_and_make_no_sum(tree: Tree) -> None:
    disk = tree.block(tree.pci("0000:00:02.0", 0) / "virtio1" / "block" / "vda", "254:0")
    assert under(tree, "254:0") == ([], "vda is no NVMe drive")
    tree.block(tree.root / "devices" / "virtual" / "block" / "md0", "9:0", (disk, tree.nvme(0)))
    assert under(tree, "9:0") == (["nvme0"], "vda is no NVMe drive")
    assert "is no block device" in under(tree, "0:27")[1]
    known = DriveWear(controller="nvme0", **SAID)
    assert Wear(drives=(known,)).amplification == 1.25
    assert Wear(drives=(known,), why="vda is no NVMe drive").amplification is None
    assert Wear(drives=(known, DriveWear(controller="nvme1"))).amplification is None
    assert Wear().amplification is None
    old = DriveWear(controller="nvme1", host_written_bytes=0, media_written_bytes=256_000_000_000)
    assert Wear(drives=(known, old)).amplification == 1.5


# ---- by children ---------------------------------------------------------------------------------------------


def test_each_drive_is_asked_by_a_child_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is well, one has no OCP page, one is not there."""
    install(tmp_path, monkeypatch, nvme0={2: HOST, 0xC0: MEDIA}, nvme1={2: HOST})
    known = Wear(drives=tuple(DriveWear(controller=f"nvme{index}") for index in range(3)))
    first, second, third = ask_wear(known, 60.0, tmp_path / "dev").drives
    assert first == DriveWear(controller="nvme0", **SAID)
    assert (second.host_written_bytes, second.amplification) == (SAID["host_written_bytes"], None)
    assert (third.host_written_bytes, third.why) == (None, f"there is no {tmp_path}/dev/nvme2 here (a container has "
                                                           "the devices that it was given)")  # fmt: skip
    assert ask_wear(Wear(why="no drive"), 60.0) == Wear(why="no drive"), "no child is started for nothing"


def test_a_drive_that_hangs_is_given_up(tmp_path: Path) -> None:
    """A pipe that nobody writes to: whoever opens it waits for ever, as in a call that a sick drive does not end."""
    os.mkfifo(tmp_path / "nvme0")
    (drive,) = ask_wear(Wear(drives=(DriveWear(controller="nvme0"),)), 3.0, tmp_path).drives
    assert drive == DriveWear(controller="nvme0", why="no answer within 3 s")


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **drives: dict[int, bytes]) -> None:
    """Device files in `tmp_path / "dev"`, and children whose kernel is the double."""
    (tmp_path / "dev").mkdir()
    for name in drives:
        (tmp_path / "dev" / name).touch()
    here = Path(nvme_double.__file__)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / here.name).write_text(here.read_text())
    (tmp_path / "site" / "sitecustomize.py").write_text("import fcntl, nvme_double\nfcntl.ioctl = nvme_double.ioctl\n")
    paths = [str(tmp_path / "site"), str(Path(drive_wear.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    told = {name: {number: body.hex() for number, body in each.items()} for name, each in drives.items()}
    monkeypatch.setenv("FAKE_NVME", json.dumps(told))
