"""The rungs: each is left for its own reason, which is said, and none is taken without bytes that came back."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer import probe
from kvxfer.errors import ConfigError
from kvxfer.io import gds, kvikio_door, ladder
from kvxfer.io.ladder import REASONS, Rung, climb
from kvxfer.report import Reporter
from kvxfer.testing import FaultyIO
from tests.doubles import Doubles
from tests.io.gds_rig import FakeCuda, FakeMemory
from tests.kvikio_double import HERE, Kvikio

TIMEOUT_S = 20.0


class Place:
    """A directory of a machine."""

    def __init__(self, kvikio: Kvikio, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kvikio, self.directory = kvikio, directory
        self.cuda = FakeCuda(kvikio)
        self.memory = FakeMemory(self.cuda)
        self._monkeypatch = monkeypatch

    def asked(self) -> Place:
        """As where kvikio and the driver gave good answers, of which there are tests above."""
        self._monkeypatch.setattr(kvikio_door, "_asked", [probe.Probe(True, "kvikio", {"compat_mode": "AUTO"})])
        self._monkeypatch.setattr(ladder, "_ask_driver", lambda *_: {"is_gds_available": 1})
        return self

    def climb(self, want: str = "auto", timeout_s: float = TIMEOUT_S) -> Rung:
        return climb(self.directory, self.memory, want=want, timeout_s=timeout_s, cuda=self.cuda)

    def let_go(self) -> None:
        """Lets what hangs go on, and waits for it."""
        self.kvikio.double.release.set()
        for thread in threading.enumerate():
            if thread.name == "kvx-ladder":
                thread.join(60)

    def names(self, rung: Rung) -> tuple[str, list[str]]:
        """The rung, and the reasons of its steps."""
        assert all(step.kind in REASONS for step in rung.steps)
        assert rung.why == "; ".join(rung.steps)
        return rung.name, [step.kind for step in rung.steps]

    def calls(self, name: str) -> int:
        return sum(call[0] == name for call in self.kvikio.double.calls)


@pytest.fixture
def place(kvikio: Kvikio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(ladder, "_said", set())
    monkeypatch.setattr(ladder, "engine_reporter", Reporter("kvxfer.engine"))
    directory = tmp_path / "root"
    directory.mkdir()
    yield Place(kvikio, directory, monkeypatch)
    assert list(directory.iterdir()) == []  # nothing is left behind


def test_direct_where_device_memory_goes_to_files_and_back(place: Place) -> None:
    rung = place.climb()
    assert place.names(rung) == ("direct", [])
    assert (place.calls("raw_write"), place.calls("raw_read"), place.calls("memory_register")) == (1, 1, 1)
    # Not where the registered memory begins, and not where the file does.
    assert [call[2:] for call in place.kvikio.double.calls if call[0] == "raw_write"] == [(8192, 4096, True)]
    assert rung.found["is_gds_available"] == 1
    assert rung.settings["mode"] == "direct"
    assert rung.settings["registered_bytes"] > 0
    assert place.memory.freed == 1
    assert place.cuda.made == {}
    assert place.kvikio.double.registered == {}
    assert rung.as_json()["rung"] == "direct"


def test_the_driver_says_how_much_a_request_may_move() -> None:
    assert Rung("direct", (), {"max_direct_io_bytes": 1 << 20}).request_bytes == 1 << 20
    assert Rung("direct", (), {"max_direct_io_bytes": 1 << 30}).request_bytes == gds.REQUEST_BYTES
    assert Rung("host").request_bytes == gds.REQUEST_BYTES


# ---- steps down


def test_without_a_device_nothing_of_kvikio_is_touched(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cuda", lambda _: probe.Probe(False, "no libcuda.so.1: no driver"))
    monkeypatch.setattr(probe, "ask", lambda *_: pytest.fail("kvikio must not be asked"))
    rung = place.climb()
    assert place.names(rung) == ("host", ["no_device"])
    assert rung.why == "direct and compat off: no CUDA device: no libcuda.so.1: no driver"
    assert "kvikio.double" not in sys.modules


def test_without_memory_to_try_it_nothing_is_chosen(place: Place) -> None:
    rung = climb(place.directory, None, timeout_s=TIMEOUT_S)
    assert place.names(rung) == ("host", ["no_device"])


@pytest.mark.parametrize(
    ("faults", "kind", "says"),
    [
        ({"import": "broken"}, "kvikio_broken", "undefined symbol"),
        ({"version": "24.12.00"}, "kvikio_version", "kvikio 24.12.00 is not supported"),
    ],
)
def test_kvikio_that_cannot_be_used(place: Place, faults: dict[str, str], kind: str, says: str) -> None:
    place.kvikio.in_children(**faults)
    rung = place.climb()
    assert place.names(rung) == ("host", [kind])
    assert says in rung.why


@pytest.mark.parametrize(
    ("faults", "kind", "says"),
    [
        (
            {"driver_open": "Unable to open GDS file driver: GPU driver version is insufficient"},
            "driver",
            "direct off: cuFile's driver: RuntimeError: Unable to open GDS file driver: GPU driver version is insuff",
        ),
        ({"is_gds_available": False}, "compat", "direct off: cuFile's own compat mode: it finds no driver module"),
        ({"refuse_files": "GPUDirect Storage not supported on current file"}, "file", "cuFile refuses files of "),
    ],
)
def test_a_driver_that_refuses_leaves_kvikios_compat_mode(
    place: Place, faults: dict[str, str], kind: str, says: str
) -> None:
    place.kvikio.in_children(**faults)
    rung = place.climb()
    assert place.names(rung) == ("compat", [kind])
    assert says in rung.why
    assert rung.settings["mode"] == "compat"
    assert place.calls("memory_register") == 0
    opened = [call for call in place.kvikio.double.calls if call[0] == "CuFile"]
    assert [call[3] for call in opened] == [True]  # in compat mode, and it is kvikio that says so
    assert place.memory.freed == 1


@pytest.mark.parametrize("where", ["driver_open", "CuFile"])
def test_a_driver_that_never_answers_is_left_in_its_process(place: Place, where: str) -> None:
    """Here the open spins for ever where something is missing that it needs."""
    kvikio_door.available(TIMEOUT_S)
    place.kvikio.in_children(hang=[where])
    start = time.monotonic()
    rung = place.climb(timeout_s=1.0)
    assert time.monotonic() - start < 15
    assert place.names(rung) == ("compat", ["hung"])
    assert "cuFile's driver: no answer within 1 s" in rung.why


def test_success_is_not_enough_bytes_are_compared(place: Place) -> None:
    place.asked()
    for call in ("raw_write", "raw_read"):
        place.kvikio.double.reset()
        place.kvikio.double.faults["flip"] = {call: 1}
        rung = place.climb()
        assert place.names(rung) == ("host", ["wrong_bytes", "wrong_bytes"])
        what = "written" if call == "raw_write" else "read"
        assert f"direct off: 1 of 2101248 bytes were {what} otherwise" in rung.why
    assert place.memory.freed == 4


def test_one_way_that_is_wrong_once_is_no_way(place: Place) -> None:
    place.kvikio.double.faults["flip"] = {"raw_read": 2}  # the second read of all: compat's
    assert place.names(place.climb()) == ("direct", [])
    place.kvikio.double.calls.clear()
    place.kvikio.double.faults["flip"] = {"raw_write": 1}
    place.kvikio.in_children(is_gds_available=False)
    assert place.names(place.climb()) == ("host", ["compat", "wrong_bytes"])


@pytest.mark.parametrize("name", ["raw_write", "raw_read", "memory_register", "CuFile"])
def test_a_call_that_never_returns_here_steps_down_in_time(place: Place, name: str) -> None:
    place.asked().kvikio.double.faults["hang"] = [name]
    start = time.monotonic()
    rung = place.climb(timeout_s=0.3)
    assert time.monotonic() - start < 20
    # Where kvikio's settings are changed around the call, compat mode hangs at them.
    assert place.names(rung) == ("host", ["hung", "hung"])
    assert len(place.cuda.made) >= 1  # what a hung call may touch is not freed
    place.let_go()


def test_a_device_that_never_answers_steps_down_in_time(place: Place) -> None:
    place.asked()
    place.memory.hangs.clear()
    rung = place.climb(timeout_s=0.2)
    assert place.names(rung) == ("host", ["hung", "hung"])
    place.memory.hangs.set()
    place.let_go()


def test_a_device_that_is_full_cannot_be_tried(place: Place) -> None:
    place.asked()
    place.memory.most = 1 << 20
    rung = place.climb()
    assert place.names(rung) == ("host", ["memory", "memory"])


def test_a_disk_that_is_full_cannot_be_tried(place: Place, faults: FaultyIO) -> None:
    place.asked()
    faults.fail("fallocate", errno.ENOSPC)
    rung = place.climb()
    assert place.names(rung) == ("host", ["full", "full"])
    assert "not tried: fallocate of " in rung.why


@pytest.mark.parametrize("op", ["open", "pread", "pwrite"])
def test_a_disk_that_fails_steps_down(place: Place, faults: FaultyIO, op: str) -> None:
    place.asked()
    faults.fail(op, errno.EIO)
    rung = place.climb()
    assert place.names(rung) == ("host", ["failed", "failed"])
    assert "Input/output error" in rung.why


def test_where_direct_io_is_refused_the_other_side_is_buffered(place: Place, faults: FaultyIO) -> None:
    place.asked()
    rule = faults.fail("open", errno.EINVAL, times=1)
    assert place.names(place.climb()) == ("direct", [])
    assert rule.hits == 1


def test_registration_that_is_refused_is_no_reason_to_step_down_and_is_shown(place: Place) -> None:
    place.asked()
    place.kvikio.double.faults["register"] = "cuFile error 5030: internal error"
    rung = place.climb()
    assert place.names(rung) == ("direct", [])
    assert rung.settings["unregistered_buffers"] == 1
    assert "5030" in rung.settings["unregistered_why"][0]


# ---- wishes


def test_a_rung_that_is_wanted_works_or_is_an_error(place: Place) -> None:
    assert place.names(place.climb("gds")) == ("direct", [])
    rung = place.climb("compat")
    assert place.names(rung) == ("compat", ["configured"])
    assert rung.why == "direct off: configured"
    assert place.names(place.climb("host")) == ("host", ["configured"])
    place.kvikio.in_children(driver_open="no")
    with pytest.raises(ConfigError, match="gds='gds' does not work in .*: direct off: cuFile's driver: .*; use 'auto'"):
        place.climb("gds")
    assert place.calls("raw_write") == 2  # compat was not tried in its stead
    place.kvikio.double.faults["flip"] = {"raw_read": 1}
    with pytest.raises(ConfigError, match="gds='compat' does not work in"):
        place.climb("compat")
    with pytest.raises(ConfigError, match="gds='uring' must be one of auto, gds, compat, host"):
        place.climb("uring")


def test_the_operators_compat_mode_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    rung = place.climb()
    assert place.names(rung) == ("compat", ["configured"])
    assert rung.why == "direct off: KVIKIO_COMPAT_MODE is ON"


# ---- said


def test_steps_are_in_the_log_once_a_directory(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.kvikio.in_children(is_gds_available=False)
    other = place.directory.parent / "other"
    other.mkdir()
    with caplog.at_level(logging.INFO, "kvxfer.engine"):
        for _ in range(2):
            place.climb()
        climb(other, place.memory, timeout_s=TIMEOUT_S, cuda=place.cuda)
        place.climb("host")  # as it was asked for
        place.climb("compat")
    first, second = caplog.records
    assert first.getMessage().startswith(f"{place.directory}: bytes go by compat: direct off: cuFile's own compat mode")
    assert second.getMessage().startswith(f"{other}: bytes go by compat")
    assert (first.levelname, first.path, first.rung) == ("WARNING", str(place.directory), "compat")  # type: ignore[attr-defined]


def test_nothing_is_said_where_nothing_was_left(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.climb()
    assert caplog.records == []


# ---- all of it in a process whose libcuda.so.1 is a double's too


@pytest.mark.parametrize(
    ("cuda", "faults", "rung"),
    [
        ("works", {}, "direct"),
        ("works", {"is_gds_available": False}, "compat"),
        ("full", {}, "host"),
        ("no device", {}, "host"),
    ],
)
def test_over_the_drivers_own_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, faults: dict[str, object], rung: str
) -> None:
    """LibCuda and CudaMemory: a raw request and a copy fail where no context is the calling thread's."""
    import json

    Doubles(tmp_path, monkeypatch).cuda(cuda)
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("KVIKIO_DOUBLE", json.dumps(faults))
    code = (
        "import json\nfrom pathlib import Path\nfrom kvxfer.io.ladder import climb_here\n"
        f"rung = climb_here(Path({str(tmp_path)!r}), timeout_s=20)\nprint(json.dumps(rung.as_json()))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["rung"] == rung, said
    if rung == "direct":
        assert said["settings"]["registered_bytes"] == said["settings"]["request_bytes"] // 8 + 8192
    if cuda == "full":
        assert [step["reason"] for step in said["steps"]] == ["memory", "memory"]


@pytest.mark.parametrize("what", [RuntimeError("odd"), KeyError("odd"), SystemExit("odd")])
@pytest.mark.parametrize("where", ["settings", "alloc", "fetch", "free", "thread"])
def test_whatever_is_raised_steps_down_and_is_said(
    place: Place, where: str, what: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: object, **__: object) -> None:
        raise RuntimeError("odd") if where == "thread" else what

    if where == "settings":
        place.kvikio.double  # noqa: B018  (imports it)
        import kvikio.defaults  # type: ignore[import-not-found,unused-ignore]

        monkeypatch.setattr(kvikio.defaults, "get", odd)
    elif where == "thread":
        place.asked()
        monkeypatch.setattr(threading.Thread, "start", odd)
    else:
        monkeypatch.setattr(place.memory, where, odd)
    rung = place.asked().climb()
    assert place.names(rung) == ("host", ["failed", "failed"])
    assert "odd" in rung.why
