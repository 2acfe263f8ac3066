"""`kvxfer doctor`: what it says is what a store and an engine will find, and nothing can hold it up."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.cli import doctor_job, doctor_view, main
from kvxfer.config import EngineConfig, staging_buffer, staging_plan
from kvxfer.drive_wear import DriveWear, Wear
from kvxfer.io import modes
from kvxfer.store import Store
from kvxfer.store.root import change_root
from kvxfer.store.shares import Quota
from kvxfer.testing import FaultyIO
from kvxfer.topology import Drive, Link
from tests import nvml_double
from tests.cli.commands import PROJECT, json_of, run
from tests.doubles import Doubles
from tests.engine.rig import Node
from tests.jobs.rig import GEOMETRY
from tests.kvikio_double import HERE as KVIKIO_DOUBLE
from tests.nvme_double import SMART, page
from tests.oracle import Model
from tests.store import rig
from tests.test_drive_wear import HOST, MEDIA, SAID, WELL, install

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_under_way() -> Iterator[None]:
    """Waits for threads that a test left in calls that hung: these are not the next test's."""
    before = set(threading.enumerate())
    yield
    for left_behind in set(threading.enumerate()) - before:
        left_behind.join(30)


def test_a_directory_that_works(tmp_path: Path, capsys: Capsys) -> None:
    code, report = json_of(capsys, "doctor", tmp_path)
    (place,) = report["directories"]
    mode = modes.probe_mode(tmp_path)
    assert (code, report["ok"], report["problems"]) == (0, True, [])
    assert place["io_mode"] == ("posix direct" if mode.direct else "posix buffered")
    assert (place["alignment"], place["why"], place["problem"]) == (mode.alignment, mode.why, "")
    assert (place["filesystem"], place["network"]) == (modes.filesystem_type(tmp_path), False)
    assert place["root"] is None
    assert abs(place["free_bytes"] - os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize) < 1 << 30
    assert list(tmp_path.iterdir()) == []
    assert report["library"]["ok"]
    assert report["versions"]["lmdb"]


def test_by_default_it_looks_where_it_runs(tmp_path: Path) -> None:
    done = run("doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "posix " in done.stdout
    assert "All that this version needs works." in done.stdout
    assert "\x1b" not in done.stdout
    for name in ("libkvx", "CUDA", "cupy", "GPUDirect Storage", "NVML", "io_uring", "staging", "open files"):
        assert f"  {name} " in done.stdout


def test_a_root_is_told_and_left_as_it_was(tmp_root: Path, capsys: Capsys) -> None:
    with Store.open(rig.config(tmp_root)) as store:
        store.register(rig.namespace(), rig.ROW)
        store.bump_epoch()
        digest = store.register(rig.namespace(), rig.ROW)
        change_root(tmp_root, lambda info: replace(info, quotas={digest: Quota(1 << 20, 4096)}))
        before = rig.snapshot(tmp_root)
        code, report = json_of(capsys, "doctor", tmp_root)
        assert rig.snapshot(tmp_root) == before
        (place,) = report["directories"]
        assert place["root"].pop("limits")["capacity_bytes"] == store.config.capacity_bytes
        said = {"format": 1, "alignment": store.alignment, "weight_epoch": 1, "durability": "process"}
        said["quotas"] = {digest.hex(): {"at_most": 1 << 20, "at_least": 4096}}
        assert (code, place["root"]) == (0, said)
        assert place["io_mode"] == store.io_mode


def test_a_root_that_asks_for_less_than_direct_io_does_is_buffered(
    tmp_root: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(rig.config(tmp_root)).close()
    monkeypatch.setattr(doctor_job, "probe_mode", lambda _: modes.IOMode(True, 16384, "direct I/O works"))
    _, report = json_of(capsys, "doctor", tmp_root)
    (place,) = report["directories"]
    assert (place["io_mode"], place["alignment"]) == ("posix buffered", 4096)
    assert "aligned to 4096" in place["why"]


def test_a_root_of_another_format_cannot_be_used(tmp_root: Path, capsys: Capsys) -> None:
    Store.open(rig.config(tmp_root)).close()
    (tmp_root / "kvxfer.json").write_text('{"format": 2}')
    code, report = json_of(capsys, "doctor", tmp_root)
    assert code == 1
    assert "format 2" in report["directories"][0]["problem"]


def test_what_is_not_there_yet_is_tried_above(tmp_path: Path, capsys: Capsys) -> None:
    code, report = json_of(capsys, "doctor", tmp_path / "a" / "b")
    assert (code, report["directories"][0]["tried"]) == (0, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_a_link_that_leads_nowhere_is_no_directory_to_come(tmp_path: Path, capsys: Capsys, target: str) -> None:
    """Nothing can be made there, or under it: also where it leads to itself."""
    (tmp_path / "link").symlink_to(tmp_path / target)
    for place in (tmp_path / "link", tmp_path / "link" / "root"):
        code, report = json_of(capsys, "doctor", place)
        assert (code, "link that leads nowhere" in report["directories"][0]["problem"]) == (1, True)


def test_a_file_is_no_directory(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "root"):
        code, report = json_of(capsys, "doctor", place, tmp_path)
        assert code == 1
        bad, good = report["directories"]
        assert "no directory" in bad["problem"]
        assert good["problem"] == ""


def test_every_step_down_has_its_reason(tmp_path: Path, capsys: Capsys) -> None:
    with FaultyIO() as io:
        io.fail("open", errno.EINVAL, times=1)
        code, report = json_of(capsys, "doctor", tmp_path)
    (place,) = report["directories"]
    assert (code, place["io_mode"]) == (0, "posix buffered")
    assert "direct I/O off: " in place["why"]
    assert "Invalid argument" in place["why"]


def test_a_disk_that_fails_is_a_problem_and_one_that_hangs_too(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "PROBE_TIMEOUT_S", 0.3)
    with FaultyIO() as io:
        io.fail("open", errno.EROFS)
        code, report = json_of(capsys, "doctor", tmp_path)
        assert code == 1
        assert "Read-only file system" in report["problems"][0]
    with FaultyIO() as io:
        io.hang("pwrite")
        assert main(["doctor", str(tmp_path)]) == 1
        assert "no answer within 0.3 s" in capsys.readouterr().out


def test_a_mount_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyIO() as io:
        io.hang("open")
        found = doctor_job.check_directory(tmp_path, timeout_s=0.2)
    assert found.problem == "no answer within 0.2 s"


def test_a_network_file_system_is_not_tried(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_job, "filesystem_type", lambda _: "nfs4")
    opens = FaultyIO.calls("open")
    code, report = json_of(capsys, "doctor", tmp_path)
    (place,) = report["directories"]
    assert (code, place["filesystem"], place["network"], place["io_mode"]) == (1, "nfs4", True, None)
    assert "nfs4 is a network file system" in place["problem"]
    assert FaultyIO.calls("open") == opens


def test_a_library_that_does_not_load_is_exit_code_1_and_a_whole_report(tmp_path: Path) -> None:
    (tmp_path / "libkvx.so").write_text("no library")
    done = run("doctor", tmp_path, env={"KVXFER_LIBRARY": str(tmp_path / "libkvx.so")})
    assert (done.returncode, done.stderr) == (1, "")
    assert "NO  libkvx" in done.stdout
    assert "Does not work: cannot load libkvx.so" in done.stdout


def test_devices_that_are_missing_are_no_problem_and_have_a_reason(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles = Doubles(tmp_path, monkeypatch)
    doubles.cuda("no device")
    doubles.module("pynvml", "raise RuntimeError('[red]broken\\x1b[0m')")
    code, report = json_of(capsys, "doctor", tmp_path)
    assert code == 0
    assert report["cuda"] == {"ok": False, "why": "cuInit answers CUDA_ERROR_NO_DEVICE (100)"}
    assert "CUDA_ERROR_NO_DEVICE" in report["gds"]["why"]
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "[red]broken\\x1b[0m" in out
    assert "\x1b" not in out


def test_devices_that_work_are_told(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    doubles = Doubles(tmp_path, monkeypatch)
    doubles.cuda("works")
    doubles.module("kvikio", "raise ImportError('not asked for here')")  # the real one looks for a device for ever
    _, report = json_of(capsys, "doctor", tmp_path)
    assert report["cuda"] == {
        "ok": True, "why": "2 x Fake H200, CUDA 13.0", "devices": ["Fake H200"] * 2, "driver": "13.0"
    }  # fmt: skip


def test_gpus_are_told_with_what_is_missing_and_why(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    Doubles(tmp_path, monkeypatch).module("pynvml", Path(nvml_double.__file__).read_text())
    nowhere = {"PciInfo": "0000FFFF:FF:1F.7"}
    one = nowhere | {"CurrPcieLinkGeneration": 1, "CurrPcieLinkWidth": 8, "Name": "H\x1b[31m200"}
    monkeypatch.setenv("FAKE_NVML", json.dumps({"gpus": [one, nowhere | {"BAR1MemoryInfo": "!Not Supported"}]}))
    code, report = json_of(capsys, "doctor", tmp_path)
    assert (code, report["gpus_why"], len(report["gpus"])) == (0, "", 2)
    first, second = report["gpus"]
    assert (first["link"], first["link_card"]) == ({"generation": 1, "width": 8}, {"generation": 5, "width": 16})
    assert "an idle card lowers it" in first["link_why"]
    assert "8 lanes of the card's 16" in first["link_why"]
    assert (first["bar1_free"], second["bar1_free"]) == (255 << 30, None)
    assert "Not Supported" in second["missing"]["bar1_free"]
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for text in (
        "BAR1: 255.0 GiB of 256.0 GiB free", "PCIe 1 x8, the card can do PCIe 5 x16", "bar1_free unknown: nvmlDevice",
        "memory: 100.0 GiB of 141.0 GiB free", "numa_node unknown: the system names none",
    ):  # fmt: skip
        assert text in out


def test_the_drive_of_a_directory_is_told(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive(("nvme0n1",), 1, (Link(4, 4),), "")
    monkeypatch.setattr(doctor_job, "drive_of", lambda path: drive if path == tmp_path else None)
    _, report = json_of(capsys, "doctor", tmp_path)
    told = {"disks": ["nvme0n1"], "numa_node": 1, "links": [{"generation": 4, "width": 4}], "why": ""}
    assert report["directories"][0]["drive"] == told
    assert main(["doctor", str(tmp_path)]) == 0
    assert "drive nvme0n1, NUMA node 1, PCIe 4 x4: 7.9 GB/s at most" in capsys.readouterr().out


def test_what_the_drives_say_of_their_wear_is_told(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first drive tells everything, the second warns and has no OCP page, the third is not there."""
    tired = page(SMART, units_written=1, media_errors=0, **WELL | {"critical_warning": 4, "percentage_used": 101})
    install(tmp_path, monkeypatch, nvme0={2: HOST, 0xC0: MEDIA}, nvme1={2: tired})
    drives = tuple(DriveWear(controller=f"nvme{index}") for index in range(3))
    monkeypatch.setattr(doctor_job, "drives_under", lambda path: Wear(drives=drives, why="sda is no NVMe drive"))
    monkeypatch.setattr("kvxfer.drive_wear.ask_wear.__defaults__", (60.0, tmp_path / "dev"))
    code, report = json_of(capsys, "doctor", tmp_path)
    wear = report["directories"][0]["wear"]
    assert (code, wear["why"], wear["amplification"]) == (0, "sda is no NVMe drive", None)
    assert wear["drives"][0] == SAID | {"controller": "nvme0", "amplification": 1.25}
    assert [drive["media_written_bytes"] for drive in wear["drives"]] == [SAID["media_written_bytes"], None, None]
    assert main(["doctor", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "nvme0: 3 % of its rated life is used, 100 % of its spare is left (least 10 %), 7 media errors; hosts wrote "
        "953.7 GiB to it since it was made, and it 1.2 TiB inside: amplification 1.25",
        "nvme1: 101 % of its rated life is used",
        "IT WARNS: its reliability is degraded; what it writes inside is not known: the drive gives no log page C0h",
        "nvme2: wear is not known: there is no ",
        "wear is not known: sda is no NVMe drive",
    ):
        assert text in said


def test_drives_that_make_one_directory_have_an_amplification_together() -> None:
    wear = Wear(drives=(DriveWear(controller="nvme0", **SAID), DriveWear(controller="nvme1", **SAID)))
    assert doctor_view._wear(wear)[2] == "together: amplification 1.25 since they were made"
    assert len(doctor_view._wear(replace(wear, why="sda is no NVMe drive"))) == 3, "no sum of a part"


def test_it_cannot_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver never answers, and kvikio would never return either."""
    doubles = Doubles(tmp_path, monkeypatch)
    doubles.cuda("hangs")
    imported = doubles.module("kvikio", "while True: pass")
    doubles.module("pynvml", "import time\ntime.sleep(1000)")
    start = time.monotonic()
    done = run("doctor", tmp_path, "--timeout", "0.5")
    assert time.monotonic() - start < 60
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("no answer within 0.5 s") >= 3
    assert not imported.exists()


def test_the_staging_it_promises_is_what_a_thread_takes(tmp_root: Path) -> None:
    """A thread that was given up says how much it holds."""
    blocks = 256
    model = Model.random(replace(GEOMETRY, head_dim=2 * GEOMETRY.head_dim), blocks)
    with FaultyIO() as io, Node(tmp_root, model, blocks_per_chunk=blocks, io_timeout_s=0.2) as node:
        slot = node.source[0].mapping.slot
        io.hang("pwrite", times=1, offset=(4096, 1 << 60))  # of a chunk: headers are in front
        node.put([0], block_ids=[list(range(blocks))])
        leaked = node.writer.stats()["leaked_bytes"]
        io.release()
    threads, whole = staging_plan(EngineConfig(io_threads=3, max_lost_threads=2, staging_bytes=1 << 30), slot)
    assert leaked == staging_buffer(slot) >= slot.slot_bytes > 2 << 20
    assert (threads, whole) == (3, 5 * leaked)


@pytest.mark.parametrize(
    ("arguments", "slot", "each"),
    [
        ("--preset llama-3.1-8b", 2 * 2**20 + 8 * 4096, 4 << 20),
        ("--preset llama-3.1-8b --blocks-per-chunk 4", 8 * 2**20 + 8 * 4096, 10 << 20),
        ("--preset deepseek-v3", 275 * 4096 + 4096, 2 << 20),
        ("--chunk-bytes 2097152", 2 * 2**20 + 4096, 4 << 20),
        ("--chunk-bytes 1", 8192, 2 << 20),
        ("", None, None),
    ],
)
def test_memory_of_a_configuration(
    tmp_path: Path, capsys: Capsys, arguments: str, slot: int | None, each: int | None
) -> None:
    for threads in (1, 8):
        _, report = json_of(capsys, "doctor", tmp_path, *arguments.split(), "--io-threads", threads)
        memory = report["memory"]
        assert (memory["slot_bytes"], memory["staging_bytes_per_thread"], memory["io_threads"]) == (slot, each, threads)
        assert memory["staging_bytes"] == (None if each is None else each * (threads + 8))


@pytest.mark.parametrize("spare", [0, -1])
def test_open_files_are_what_a_store_will_ask_for(tmp_path: Path, spare: int) -> None:
    """13 slabs of half a MiB in 8 MiB, and 64 to spare: the doctor says no exactly where a store does."""
    limit = 13 + 64 + spare
    script = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "from kvxfer.cli import main\n"
        f"code = main(['doctor', {str(tmp_path)!r}, '--capacity-bytes', str(8 << 20), '--json'])\n"
        "from kvxfer import ConfigError, Store, StoreConfig\n"
        "try:\n"
        f"    Store.open(StoreConfig(root={str(tmp_path / 'root')!r}, capacity_bytes=8 << 20)).close()\n"
        "except ConfigError as exc: sys.exit(10 + code if 'open files' in str(exc) else 99)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == ((0, "") if spare == 0 else (11, ""))
    assert ("77 open files are needed" in done.stdout) == (spare < 0)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--preset gpt-2", ["--preset", "'gpt-2'", "llama-3.1-8b"]),
        ("--preset llama-3.1-8b --chunk-bytes 5", ["--preset", "--chunk-bytes"]),
        ("--chunk-bytes 0", ["--chunk-bytes 0"]),
        ("--chunk-bytes 17179869185", ["--chunk-bytes 17179869185"]),
        ("--blocks-per-chunk 257", ["--blocks-per-chunk 257", "1 to 256"]),
        ("--io-threads 0", ["io_threads=0"]),
        ("--capacity-bytes 1000", ["capacity_bytes=1000"]),
        ("--timeout 0", ["--timeout 0"]),
        ("--timeout nan", ["--timeout nan"]),
    ],
)
def test_a_bad_option_is_one_line(arguments: str, names: list[str], capsys: Capsys) -> None:
    assert main(["doctor", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [name for name in names if name not in err] == []


def test_a_capacity_that_does_not_fit_is_named(tmp_path: Path, capsys: Capsys) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    code, report = json_of(capsys, "doctor", tmp_path, "--capacity-bytes", free + (8 << 30))
    assert code == 1
    assert "does not fit" in report["directories"][0]["problem"]
    code, report = json_of(capsys, "doctor", tmp_path, "--capacity-bytes", free // 2)
    assert (code, report["directories"][0]["problem"]) == (0, "")


@pytest.mark.parametrize(
    ("faults", "rung", "reasons"), [({}, "direct", []), ({"driver_open": "no"}, "compat", ["driver"])]
)
def test_the_way_of_a_devices_memory_is_tried_where_there_is_a_device(
    tmp_path: Path, faults: dict[str, str], rung: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Doubles(tmp_path, monkeypatch).cuda("works")
    place = tmp_path / "place"
    place.mkdir()
    environment = {
        "PYTHONPATH": os.pathsep.join([str(KVIKIO_DOUBLE), str(PROJECT)]),
        "KVIKIO_DOUBLE": json.dumps(faults | {"register": "cuFile error 5030: internal error"}),
    }
    done = run("doctor", place, "--json", env=environment)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["directories"]
    assert told["rung"]["rung"] == rung, told["rung"]
    assert [step["reason"] for step in told["rung"]["steps"]] == reasons
    assert list(place.iterdir()) == []
    shown = run("doctor", place, env=environment).stdout
    assert f"a device's memory goes by {rung}" in shown
    assert ("its memory is not registered with the drive: " in shown) == (rung == "direct")


def test_without_a_device_a_devices_memory_has_its_reason_too(tmp_path: Path, capsys: Capsys) -> None:
    _, report = json_of(capsys, "doctor", tmp_path)
    (place,) = report["directories"]
    assert place["rung"]["rung"] == "host"
    assert place["rung"]["steps"][0]["reason"] == "no_device"
    assert main(["doctor", str(tmp_path)]) == 0
    assert "a device's memory goes by host: direct and compat off: no CUDA device: " in capsys.readouterr().out
