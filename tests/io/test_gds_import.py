"""The backend over kvikio's double: its settings, and what comes before kvikio is imported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvxfer import probe
from kvxfer.errors import ConfigError, DeviceError, ForkError
from kvxfer.io import kvikio_door
from kvxfer.io.gds import DIRECT, GdsBackend
from tests.io.gds_rig import KIB, FakeCuda, Machine, machine, random
from tests.kvikio_double import Kvikio

__all__ = ["machine"]


def test_settings_are_raised_and_shown_and_the_compat_mode_is_left_as_it_was(machine: Machine) -> None:
    backend = machine.backend(depth=12, request_bytes=8 << 20)
    window = machine.device(random(4 * KIB))
    backend.register(window.address, window.nbytes)
    with backend.open(machine.path, create=True) as file:
        file.pwrite(window).get()
    import kvikio.defaults

    assert kvikio.defaults.get("compat_mode") == kvikio.CompatMode.AUTO
    described = backend.describe()
    assert (described["mode"], described["kvikio"]) == ("direct", "26.10.00")
    assert (described["requests_in_flight"], described["request_bytes"]) == (12, 8 << 20)
    assert described["settings"]["auto_direct_io_read"] == {"was": False, "is": True}
    assert kvikio.defaults.get("auto_direct_io_read") is True


@pytest.mark.parametrize("given", [None, "/somewhere/cufile.log"])
def test_cufiles_log_does_not_land_in_the_working_directory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("CUFILE_LOGFILE_PATH", raising=False)
    if given:
        monkeypatch.setenv("CUFILE_LOGFILE_PATH", given)
    machine.backend()
    assert os.environ["CUFILE_LOGFILE_PATH"] == (given or os.devnull)
    monkeypatch.setenv("CUFILE_LOGFILE_PATH", "")  # so that it is taken away again


def refused(kvikio: Kvikio) -> probe.Probe:
    found = kvikio_door.available(5)
    assert not found.ok
    assert "kvikio.double" not in sys.modules
    with pytest.raises(DeviceError) as info:
        GdsBackend(cuda=FakeCuda(kvikio))
    assert str(info.value) == found.why
    return found


def test_without_a_device_kvikio_is_not_imported(kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cuda", lambda _: probe.Probe(False, "cuInit answers CUDA_ERROR_NO_DEVICE (100)"))
    monkeypatch.setattr(probe, "ask", lambda *_: pytest.fail("kvikio must not be asked"))
    found = refused(kvikio)
    assert found.why == "no CUDA device: cuInit answers CUDA_ERROR_NO_DEVICE (100)"
    assert found.found["kind"] == "no_device"


def test_kvikio_that_is_not_there(kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert (refused(kvikio).why, refused(kvikio).found["kind"]) == ("kvikio is not installed", "no_kvikio")


def test_kvikio_that_is_broken(kvikio: Kvikio) -> None:
    kvikio.in_children(**{"import": "broken"})
    found = refused(kvikio)
    assert found.why == ("kvikio cannot be imported: ImportError: libcufile.so.0: undefined symbol: cuFileNoSuchThing")
    assert found.found["kind"] == "kvikio_broken"


def test_kvikio_that_never_ends_its_import(kvikio: Kvikio) -> None:
    kvikio.in_children(**{"import": "hangs"})
    assert kvikio_door.available(0.5).why == "kvikio cannot be imported: no answer within 0.5 s"
    refused(kvikio)


@pytest.mark.parametrize("version", ["26.02.00", "27.00.00", "24.12.01", "27.0a1", "unknown", ""])
def test_kvikio_of_another_version(kvikio: Kvikio, version: str) -> None:
    kvikio.in_children(version=version)
    found = refused(kvikio)
    assert found.why == f"kvikio {version} is not supported: want 26.4 or newer, and older than 27.0"
    assert found.found["kind"] == "kvikio_version"


@pytest.mark.parametrize("version", ["26.04.00", "26.10.00", "26.12.03"])
def test_kvikio_of_a_version_that_will_do_is_asked_once(
    kvikio: Kvikio, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    kvikio.in_children(version=version)
    assert kvikio_door.available(20).why == f"kvikio {version} on 1 x Fake H200, CUDA 13.0"
    monkeypatch.setattr(probe, "ask", lambda *_: pytest.fail("asked again"))
    assert kvikio_door.available().ok


def test_not_in_a_fork(machine: Machine) -> None:
    backend = machine.backend()
    window = machine.device(random(4 * KIB))
    file = backend.open(machine.path, create=True)
    assert file.pwrite(window).get() == 4 * KIB
    child = os.fork()
    if child == 0:  # pragma: no cover
        said = 0
        for call in (
            lambda: file.pwrite(window),
            lambda: backend.adopt(file.fd),
            lambda: backend.register(window.address, window.nbytes),
        ):
            try:
                call()
            except ForkError as exc:
                said += "is a fork of it" in str(exc)
            except BaseException:
                pass
        os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_the_interpreter_ends_though_kvikio_hangs(kvikio: Kvikio, tmp_path: Path) -> None:
    code = f"""
import numpy as np
from kvxfer import probe
probe.cuda = lambda timeout_s: probe.Probe(True, "a device")
from kvxfer.io.gds import GdsBackend, Window
from kvxfer.staging import AlignedBuffer
import threading
buffer = AlignedBuffer(8192)
class Cuda:
    def enter(self, address):
        from kvikio import double
        double.here.context = self
backend = GdsBackend(cuda=Cuda(), io_timeout_s=0.1, depth=2, max_lost=0)
from kvikio import double
double.faults["hang"] = ["raw_write"]
from pathlib import Path
file = backend.open(Path({str(tmp_path / "file")!r}), create=True)
calls = [file.pwrite(Window(buffer.address, 8192)) for _ in range(3)]
for call in calls:
    try: call.get()
    except OSError as exc: print(exc.errno)
backend.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.split() == [str(errno.ETIMEDOUT)] * 2 + [str(errno.ENOBUFS)]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("posix", {}),
        (DIRECT, {"depth": 0}),
        (DIRECT, {"request_bytes": 0}),
        (DIRECT, {"request_bytes": 5000}),
        (DIRECT, {"io_timeout_s": 0}),
    ],
)
def test_what_cannot_be(machine: Machine, mode: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        machine.backend(mode, **options)
