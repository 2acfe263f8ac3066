"""kvx.h, its ctypes mirror and the library agree: names, argument counts, enums, sizes."""

from __future__ import annotations

import ctypes as C
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer import _native

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "csrc" / "kvx.h").read_text()
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)


def enum(name: str) -> dict[str, int]:
    """The members of an enum of kvx.h with their values."""
    body = re.search(rf"enum {name} \{{(.*?)\}};", CODE, flags=re.DOTALL)
    assert body, name
    values: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in body[1].split(","))):
        member, _, value = (word.strip() for word in item.partition("="))
        values[member] = int(value) if value else len(values)
    return values


def functions() -> dict[str, int]:
    """The functions that kvx.h declares, with their number of arguments."""
    found = {}
    for name, arguments in re.findall(r"KVX_API [^;(]*?(kvx_\w+)\(([^)]*)\);", CODE):
        found[name] = 0 if arguments.strip() == "void" else arguments.count(",") + 1
    assert len(found) == CODE.count("KVX_API ") - 1  # its own #define
    return found


def structs() -> dict[str, int]:
    """The structs that kvx.h defines, with their number of fields."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", CODE, flags=re.DOTALL):
        found[name] = sum(line.count(",") + 1 for line in body.split(";") if line.strip())
    return found


def test_every_function_is_mirrored_with_as_many_arguments() -> None:
    mirrored = {name: len(arguments) for name, (_, arguments) in _native._SIGNATURES.items()}
    assert mirrored == functions()


def test_the_library_exports_the_functions_and_nothing_else() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(_native.library_path())], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines() if " T " in line}
    ours = {name for name in exported if not name.startswith(("_Z", "__", "_init", "_fini"))}
    assert ours == set(functions())


def test_structs_have_the_same_names_fields_and_sizes() -> None:
    assert {name: len(mirror._fields_) for name, mirror in _native.STRUCTS.items()} == structs()
    for name, mirror in _native.STRUCTS.items():
        assert _native.lib().kvx_struct_size(name.encode()) == C.sizeof(mirror), name
    assert _native.lib().kvx_struct_size(b"kvx_nothing") == 0
    assert _native.lib().kvx_struct_size(None) == 0


def test_ops_and_actions_are_those_of_the_header() -> None:
    ops = enum("kvx_op")
    assert ops.pop("KVX_OP_COUNT") == len(_native.OPS)
    assert {f"KVX_OP_{name.upper()}": i for i, name in enumerate(_native.OPS)} == ops
    assert {f"KVX_FAULT_{name.upper()}": i for name, i in _native.FAULT_ACTIONS.items()} == enum("kvx_fault_action")
    assert enum("kvx_direction") == {"KVX_STORE": _native.STORE, "KVX_LOAD": _native.LOAD}


def test_version_and_features() -> None:
    match = re.search(r"#define KVX_ABI_VERSION (\d+)", HEADER)
    assert match
    assert _native.lib().kvx_abi_version() == _native.ABI_VERSION == int(match[1])
    assert set(_native.lib().kvx_features().decode().split(",")) <= {"avx512", "avx2", "sse4.2", "scalar"}


@pytest.mark.parametrize("most", ["scalar", "avx2", "avx512"])
def test_the_instruction_set_can_be_lowered_and_sums_stay_the_same(most: str) -> None:
    """KVXFER_ISA is read once, hence a process of its own."""
    code = (
        "import numpy as np; from kvxfer import _native, checksum; lib = _native.lib()\n"
        "data = np.random.default_rng(5).integers(0, 256, 70_001, dtype=np.uint8)\n"
        "for start in (0, 1, 63): \n"
        "    for n in [*range(0, 200), 4095, 4096, 4097, 69_000]:\n"
        "        for word in (0, 1, 1000, 1023, 1024 * 77 + 5):\n"
        "            part = data[start : start + n]\n"
        "            got = lib.kvx_checksum(_native.address(part), n, word)\n"
        "            assert got == checksum.segment_checksum(part, word), (start, n, word)\n"
        "print(lib.kvx_features().decode(), lib.kvx_crc32c(b'123456789', 9),\n"
        "      lib.kvx_crc32c(_native.address(data), 70_001))\n"
    )
    environment = {**os.environ, "KVXFER_ISA": most}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    features, check, whole = done.stdout.split()
    if most == "scalar":
        assert features == "scalar"
    assert (most == "avx512") or "avx512" not in features
    assert int(check) == 0xE3069283  # the value that CRC catalogues give
    data = np.random.default_rng(5).integers(0, 256, 70_001, dtype=np.uint8)
    assert int(whole) == _native.lib().kvx_crc32c(_native.address(data), 70_001)
