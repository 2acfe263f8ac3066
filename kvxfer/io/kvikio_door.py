"""Where kvikio is let in: no other module imports it, and it is asked for in a child first.

Without a CUDA device its reads and writes raise, and cuFile's driver open spins for ever.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvxfer import probe
from kvxfer.errors import DeviceError

SUPPORTED = ((26, 4), (27, 0))  # from the first version on, before the second
_SETTINGS_S = 30.0

_settings = threading.Lock()
_asked: list[probe.Probe] = []  # what `available` found

_IMPORT = """
import kvikio, kvikio.buffer, kvikio.cufile, kvikio.cufile_driver, kvikio.defaults
answer({"version": kvikio.__version__, "compat_mode": kvikio.defaults.get("compat_mode").name})
"""


def available(timeout_s: float = probe.TIMEOUT_S) -> probe.Probe:
    """Whether kvikio can be imported here: a device answers, kvikio is there, whole, and of a version that was tried.

    Asked once a process, in children that have `timeout_s` each. `found` has `kind` where it cannot (no_device,
    no_kvikio, kvikio_broken, kvikio_version), `version` and `compat_mode` (ON where KVIKIO_COMPAT_MODE says so) where
    it can.
    """
    if not _asked:
        _asked.append(_ask(timeout_s))
    return _asked[0]


def _ask(timeout_s: float) -> probe.Probe:
    if not (device := probe.cuda(timeout_s)).ok:
        return probe.Probe(False, f"no CUDA device: {device.why}", {"kind": "no_device"})
    if importlib.util.find_spec("kvikio") is None:
        return probe.Probe(False, "kvikio is not installed", {"kind": "no_kvikio"})
    answer = probe.ask(_IMPORT, timeout_s)
    if answer.said is None:
        return probe.Probe(False, f"kvikio cannot be imported: {answer.why}", {"kind": "kvikio_broken"})
    version = str(answer.said["version"])
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    if not SUPPORTED[0] <= _numbers(version) < SUPPORTED[1]:
        why = f"kvikio {version} is not supported: want {low} or newer, and older than {high}"
        return probe.Probe(False, why, {"kind": "kvikio_version"} | answer.said)
    return probe.Probe(True, f"kvikio {version} on {device.why}", answer.said)


@contextmanager
def held() -> Iterator[None]:
    """Alone with kvikio's settings. DeviceError where whoever has them does not come back."""
    if not _settings.acquire(timeout=_SETTINGS_S):
        raise DeviceError(f"kvikio's settings are held by a call that has not returned for {_SETTINGS_S:g} s")
    try:
        yield
    finally:
        _settings.release()


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (-1, -1) where it does not begin with two."""
    parts = version.split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else (-1, -1)


def import_kvikio() -> Any:
    """The module. DeviceError with the reason where it cannot be used."""
    if not (found := available()).ok:
        raise DeviceError(found.why)
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)  # else cufile.log lands in the working directory
    import kvikio
    import kvikio.defaults

    return kvikio
