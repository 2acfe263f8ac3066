"""Reads the assembly that triton makes for AMD's devices."""

from __future__ import annotations

import re

from bench.kernels.code import Instruction, Resources, UnreadableError

_LABEL = re.compile(r"^(\.LBB\w+):")
_LINE = re.compile(r"^\s+([a-z][a-z0-9]*_\w+)\b([^;]*)")
_ACCESS = re.compile(r"(?:global|flat|buffer)_(load|store)_(?:lds_)?(\w+)")
# flat_* may be of any memory: nothing says that it is not global.
_WIDTHS = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "b128": 16, "b96": 12, "b64": 8, "b32": 4}
_NUMBERS = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


def instructions(assembly: str) -> list[Instruction]:
    """Those between the kernel's first label and its end.

    Raises:
        UnreadableError: there are none.
    """
    found: list[Instruction] = []
    labels: list[str] = []
    for line in assembly.split(".amdgpu_metadata", 1)[0].splitlines():
        if label := _LABEL.match(line):
            labels.append(label[1])
        elif match := _LINE.match(line):
            opcode, operands = match[1], match[2].strip()
            access = _ACCESS.match(opcode)
            width = _width(access[2]) if access else 0
            found.append(
                Instruction(
                    opcode,
                    target=operands if opcode.startswith(("s_branch", "s_cbranch")) else "",
                    ends=opcode in ("s_branch", "s_endpgm"),
                    labels=tuple(labels),
                    load=width if access and access[1] == "load" else 0,
                    store=width if access and access[1] == "store" else 0,
                    local=opcode.startswith("scratch_"),
                    call=opcode == "s_swappc_b64",
                )
            )
            labels = []
    if not any(one.opcode == "s_endpgm" for one in found):
        raise UnreadableError(f"no kernel's end among {len(found)} instructions")
    return found


def _width(name: str) -> int:
    if name in _WIDTHS:
        return _WIDTHS[name]
    if re.match(r"(u|s)?byte|(u|i)8", name):
        return 1
    if re.match(r"(u|s)?short|(b|u|i)16", name):
        return 2
    raise UnreadableError(f"an access of global memory of unknown width: {name}")


def resources(assembly: str) -> Resources:
    """From the kernel's metadata.

    Raises:
        UnreadableError: it does not name exactly one.
    """
    values: dict[str, int] = {}
    for name in _NUMBERS:
        found = re.findall(rf"^\s+\.{name}:\s+(\d+)\s*$", assembly, re.MULTILINE)
        if len(found) != 1:
            raise UnreadableError(f"{name} is given {len(found)} times in the kernel's metadata, want once")
        values[name] = int(found[0])
    spills = values["vgpr_spill_count"] + values["sgpr_spill_count"]
    return Resources(values["vgpr_count"], values["private_segment_fixed_size"], spills)
