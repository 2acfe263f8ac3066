"""Reads what nvdisasm and cuobjdump print of a cubin with one kernel."""

from __future__ import annotations

import re

from bench.kernels.code import Instruction, Resources, UnreadableError

_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.\w+)*)\b"
    r"(?P<operands>[^;]*);"
)
_ALWAYS = re.compile(r"\s*(`\(|$)")  # no predicate among the operands
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`?\(?(\.L_\w+)\)?")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_RESOURCES = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:\d+\s+LOCAL:(\d+)")


def instructions(sass: str) -> list[Instruction]:
    """Those of `nvdisasm -c`.

    Raises:
        UnreadableError: there are none, or a line that has an address is no instruction.
    """
    found: list[Instruction] = []
    labels: list[str] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels.append(label[1])
        elif match := _LINE.match(line):
            opcode, operands = match["opcode"], match["operands"]
            kind, *modifiers = opcode.split(".")
            if kind in ("BRX", "JMX"):
                raise UnreadableError(f"{opcode}: where it goes is not in the listing")
            target = _TARGET.search(operands) if kind in ("BRA", "JMP") else None
            always = match["predicate"] is None and _ALWAYS.match(operands)
            # LD and ST are of any memory: nothing says that it is not global.
            found.append(
                Instruction(
                    opcode,
                    target=target[1] if target else "",
                    ends=bool(always) and kind in ("BRA", "JMP", "EXIT", "RET"),
                    labels=tuple(labels),
                    load=_width(modifiers) if kind in ("LDG", "LD", "LDGSTS") else 0,
                    store=_width(modifiers) if kind in ("STG", "ST") else 0,
                    local=kind in ("LDL", "STL"),
                    call=kind == "CALL",
                )
            )
            labels = []
        elif re.match(r"^\s*/\*[0-9a-f]{4,}\*/", line):
            raise UnreadableError(f"no instruction in {line.strip()!r}")
    if not found:
        raise UnreadableError("no instruction in what nvdisasm printed")
    return found


def _width(modifiers: list[str]) -> int:
    return next((_WIDTHS[each] for each in modifiers if each in _WIDTHS), 4)


def resources(usage: str) -> Resources:
    """Of the one kernel in `cuobjdump -res-usage`.

    Raises:
        UnreadableError: it does not name exactly one.
    """
    found = _RESOURCES.findall(usage)
    if len(found) != 1:
        raise UnreadableError(f"{len(found)} kernels' resources in what cuobjdump printed, want one")
    registers, stack, local = map(int, found[0])
    return Resources(registers, stack + local)
