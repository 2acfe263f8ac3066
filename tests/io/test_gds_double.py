"""The double of kvikio has the signatures, the names and the defaults of the kvikio that is installed.

That one is only imported here, in a process of its own: without a device its reads, writes and driver calls raise, or
never return.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

from tests.kvikio_double import HERE

_TELL = """
import enum, inspect, json, sys
import kvikio, kvikio.buffer, kvikio.cufile, kvikio.cufile_driver, kvikio.defaults

def signature(function):
    return [(name, str(each.kind), repr(each.default)) for name, each in inspect.signature(function).parameters.items()]

def members(of):
    kinds = {}
    for name, member in vars(of).items():
        if isinstance(member, property):
            kinds[name] = "property"
        elif inspect.isfunction(member) and (not name.startswith("_") or name in ("__init__", "__enter__", "__exit__")):
            kinds[name] = signature(member)
    return kinds

def settings(names):
    found = {}
    for name in names:
        try:
            found[name] = repr(kvikio.defaults.get(name))
        except KeyError:
            found[name] = "no such setting"
    return found

told = {
    "version": kvikio.__version__,
    "CuFile": members(kvikio.CuFile),
    "IOFuture": members(kvikio.cufile.IOFuture),
    "CompatMode": {mode.name: int(mode) for mode in kvikio.CompatMode},
    "buffer": {name: signature(getattr(kvikio, name))
               for name in ("memory_register", "memory_deregister", "bounce_buffer_free")},
    "defaults": {name: signature(getattr(kvikio.defaults, name))
                 for name in ("get", "set", "is_compat_mode_preferred")},
    "with": members(kvikio.defaults.ConfigContextManager),
    "settings": settings(["compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size",
                          "auto_direct_io_read", "auto_direct_io_write", "no_such"]),
    "driver": {name: signature(getattr(kvikio.cufile_driver, name))
               for name in ("get", "set", "driver_open", "driver_close", "libcufile_version")},
    "libcufile_version": len(kvikio.cufile_driver.libcufile_version()),
}
print(json.dumps(told))
"""

# Getting one opens the driver: only the names can be compared.
_PROPERTIES = """
import json
from kvikio._lib import cufile_driver
print(json.dumps(sorted(name for name in vars(cufile_driver.DriverProperties) if not name.startswith("_"))))
"""


def told(code: str, path: str = "") -> object:
    environment = os.environ | {"PYTHONPATH": path, "CUFILE_LOGFILE_PATH": os.devnull}
    for name in ("KVIKIO_DOUBLE", "KVIKIO_COMPAT_MODE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_double_is_like_the_real_one() -> None:
    real, double = told(_TELL), told(_TELL, str(HERE))
    assert isinstance(real, dict) and isinstance(double, dict)
    assert real["version"].startswith(importlib.metadata.version("kvikio-cu13").rpartition(".")[0])
    extra = {"raw_read_async", "raw_write_async", "read", "write"}  # of which kvxfer makes no use
    real["CuFile"] = {name: told for name, told in real["CuFile"].items() if name not in extra}
    assert double == real


def test_so_are_the_driver_s_properties() -> None:
    names = told(
        "import json\nfrom kvikio import cufile_driver\nprint(json.dumps(sorted(cufile_driver._PROPERTIES)))", str(HERE)
    )
    assert names == told(_PROPERTIES)


def test_what_the_ladder_asks_for_is_among_them() -> None:
    """`cufile_driver.get` raises KeyError for others."""
    from kvxfer.io import ladder

    names = ladder._DRIVER.split("names = (")[1].split(")")[0].replace('"', "").replace(",", " ").split()
    known = told(_PROPERTIES)
    assert isinstance(known, list)
    assert len(names) > 3 and set(names) <= set(known)


def test_the_real_one_takes_a_window_for_device_memory() -> None:
    """As its own calls read a buffer, up to where they would ask the driver."""
    code = (
        "import json\nfrom kvikio._lib.arr import asarray\nfrom kvxfer.io.gds import Window\n"
        "found = asarray(Window(0x7f0000001000, 12345))\n"
        "print(json.dumps([found.cuda, found.contiguous, found.nbytes, found.ptr, found.readonly, found.ndim]))"
    )
    assert told(code, str(HERE.parents[1])) == [True, True, 12345, 0x7F0000001000, False, 1]
