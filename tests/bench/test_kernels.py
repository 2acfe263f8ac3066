"""`make kernels`: what its parsers read, what its rules refuse, and one small compile for a device that is not here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import __main__ as command
from bench.kernels import amd, nvidia, page, rules
from bench.kernels.code import Code, Compiled, Instruction, Resources, UnreadableError
from bench.kernels.compiling import compiled

# As nvdisasm -c prints them: a loop that moves 2 x 16 bytes a turn, in an outer one; a load through a table before it.
GOOD = """
        .other          move_rows,@"STO_CUDA_ENTRY STV_DEFAULT"
move_rows:
.text.move_rows:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0040*/               @P0 EXIT ;
.L_x_9:
        /*00b0*/                   LDG.E.64 R2, desc[UR4][R6.64+0x10] ;
        /*00c0*/              @!P3 BRA `(.L_x_0) ;
.L_x_8:
        /*00d0*/                   LDG.E.64 R4, desc[UR4][R6.64] ;
        /*00e0*/                   BSSY B0, `(.L_x_3) ;
        /*00f0*/              @!P1 LDG.E.128 R20, desc[UR4][R4.64] ;
        /*0100*/              @!P1 LDG.E.128.CONSTANT R24, desc[UR4][R4.64+0x800] ;
        /*0110*/                   IMAD.WIDE R4, R8, 0x10, R4 ;
.L_x_3:
        /*0120*/              @!P1 STG.E.128 desc[UR4][R8.64], R20 ;
        /*0130*/              @!P1 STG.E.128 desc[UR4][R8.64+0x800], R24 ;
        /*0140*/               @P0 BRA `(.L_x_8) ;
.L_x_0:
        /*0150*/                   ISETP.GE.AND P0, PT, R0, UR5, PT ;
        /*0160*/              @!P0 BRA `(.L_x_9) ;
        /*0170*/                   EXIT ;
.L_x_10:
        /*0180*/                   BRA `(.L_x_10);
        /*0190*/                   NOP;
.L_x_11:
"""
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function move_rows:
  REG:48 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# As triton's backend for AMD prints it: the store of a turn stands behind the loop's end and jumps back into it.
AMD = """
\t.globl\tmove_rows
move_rows:                              ; @move_rows
.Lfunc_begin0:
\t.loc\t1 67 0
; %bb.0:
\ts_load_dwordx2 s[2:3], s[0:1], 0x0
\ts_branch .LBB0_2
.LBB0_1:                                ;   in Loop: Header=BB0_2 Depth=1
\ts_or_b64 exec, exec, s[4:5]
\ts_cbranch_scc0 .LBB0_4
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tglobal_load_dwordx2 v[0:1], v21, s[10:11] offset:8
\tglobal_load_dwordx4 v[16:19], v[0:1], off
\ts_and_saveexec_b64 s[4:5], vcc
\ts_cbranch_execz .LBB0_1
\ts_branch .LBB0_5
.LBB0_4:
\ts_endpgm
.LBB0_5:
\tglobal_store_dwordx4 v[12:13], v[16:19], off
\ts_branch .LBB0_1
\t.section\t.rodata,"a",@progbits
\t.amdhsa_kernel move_rows
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
    .name:           move_rows
    .private_segment_fixed_size: 0
    .sgpr_spill_count: 0
    .vgpr_count:     44
    .vgpr_spill_count: 0
"""


def nvidia_code(sass: str = GOOD, usage: str = USAGE, width: int = 16) -> Code:
    return Code.of(nvidia.instructions(sass), nvidia.resources(usage), width)


def judged(code: Code, **other: Any) -> tuple[str, ...]:
    return rules.faults(
        Compiled(**({"name": "rows-16-gather", "target": "sm_90", "width": 16, "per_turn": 2} | other), code=code)
    )


# ---- reading


def test_a_good_kernel_of_nvidias() -> None:
    code = nvidia_code()
    assert code == Code(registers=48, local_bytes=0, spills=0, loads={8: 1, 16: 2}, stores={16: 2}, loop=8)
    assert judged(code) == ()
    one = Compiled(name="n", target="sm_90", width=16, per_turn=2, code=code)
    assert one.per_16_bytes == 4


def test_a_good_kernel_of_amds_whose_loop_is_in_two_places() -> None:
    code = Code.of(amd.instructions(AMD), amd.resources(AMD), 16)
    assert code == Code(registers=44, local_bytes=0, spills=0, loads={8: 1, 16: 1}, stores={16: 1}, loop=9)
    assert judged(code, target="gfx942", per_turn=1) == ()


def test_sums_alone_are_loops_of_loads() -> None:
    sass = "\n".join(line for line in GOOD.splitlines() if "STG" not in line)
    code = nvidia_code(sass)
    assert (code.loop, code.stores, code.loads) == (6, {}, {8: 1, 16: 2})
    assert Compiled(name="sum", target="sm_90", width=16, per_turn=2, code=code).per_16_bytes == 3
    assert judged(code, name="sum") == ()
    (load,) = [line for line in sass.splitlines() if "LDG.E.128" in line][-1:]
    code = nvidia_code(sass.replace(load, "\n".join([load] * 3)))
    assert (code.loop, code.loads) == (8, {8: 1, 16: 4})
    assert Compiled(name="sum", target="sm_90", width=16, per_turn=2, code=code).per_16_bytes == 2  # two turns in one


def test_an_unrolled_loop_counts_as_the_turns_it_has() -> None:
    moves = [line for line in GOOD.splitlines() if ".128" in line]
    twice = GOOD.replace(moves[-1], "\n".join([moves[-1], *moves]))
    code = nvidia_code(twice)
    assert code.stores == {16: 4} and judged(code) == ()
    assert Compiled(name="n", target="sm_90", width=16, per_turn=2, code=code).per_16_bytes == 3


@pytest.mark.parametrize(
    ("opcode", "load", "store"),
    [("LDG.E", 4, 0), ("LDG.E.U8.CONSTANT", 1, 0), ("LDG.E.S16", 2, 0), ("LDG.E.64", 8, 0), ("LD.E.128", 16, 0),
     ("LDG.E.ENL2.256", 32, 0), ("STG.E.U16", 0, 2), ("ST.E", 0, 4), ("LDC.64", 0, 0), ("LDS.128", 0, 0),
     ("RED.E.ADD.64", 0, 0)],
)  # fmt: skip
def test_widths_of_nvidias_accesses(opcode: str, load: int, store: int) -> None:
    (one,) = nvidia.instructions(f"        /*0000*/              @!UP1 {opcode} R2, [R4.64] ;")
    assert (one.opcode, one.load, one.store) == (opcode, load, store)


@pytest.mark.parametrize(
    ("opcode", "load", "store"),
    [("global_load_dword", 4, 0), ("global_load_ubyte_d16_hi", 1, 0), ("global_load_sshort", 2, 0),
     ("flat_load_dwordx4", 16, 0), ("buffer_load_dwordx2", 8, 0), ("global_store_short", 0, 2),
     ("global_store_byte", 0, 1), ("global_store_b128", 0, 16), ("s_load_dwordx2", 0, 0), ("ds_read_b128", 0, 0)],
)  # fmt: skip
def test_widths_of_amds_accesses(opcode: str, load: int, store: int) -> None:
    one, _ = amd.instructions(f"\t{opcode} v[0:1], v[2:3], off\n\ts_endpgm\n")
    assert (one.opcode, one.load, one.store) == (opcode, load, store)


@pytest.mark.parametrize(
    "read",
    [
        lambda: nvidia.instructions(""),
        lambda: nvidia.instructions("LDG.E.128 R2, [R4.64] ;"),
        lambda: nvidia.instructions("        /*0000*/                   ????? ;"),
        lambda: nvidia.instructions("        /*0000*/                   BRX R2 -0x10 ;"),
        lambda: nvidia.resources(""),
        lambda: nvidia.resources(USAGE + USAGE),
        lambda: nvidia.resources(USAGE.replace("REG:48", "REG:?")),
        lambda: nvidia_code(GOOD.replace("LDG", "LDX").replace("STG", "STX")),
        lambda: nvidia_code(GOOD.replace("`(.L_x_8)", "`(.L_x_77)")),
        lambda: amd.instructions(""),
        lambda: amd.instructions(AMD.replace("s_endpgm", "s_nop 0")),
        lambda: amd.instructions(AMD.replace("store_dwordx4", "store_dwordx9")),
        lambda: amd.resources(""),
        lambda: amd.resources(AMD + AMD.split("---")[1]),
        lambda: amd.resources(AMD.replace("vgpr_spill_count: 0", "vgpr_spill_count: ")),
    ],
)
def test_what_is_not_understood_is_no_pass(read: Any) -> None:
    with pytest.raises(UnreadableError):
        read()


def test_the_innermost_loop_with_most_of_the_data_is_looked_at() -> None:
    """A loop over a table beside it, a remainder's loop with less data, and the outer loop are not it."""
    listing = [
        Instruction("OUTER", labels=("a",)),
        Instruction("TABLE", labels=("b",), load=8),
        Instruction("BRA", target="b"),
        Instruction("DATA", labels=("c",), store=16),
        Instruction("DATA", store=16),
        Instruction("BRA", target="c"),
        Instruction("DATA", labels=("d",), store=16),
        Instruction("BRA", target="d"),
        Instruction("BRA", target="a"),
        Instruction("EXIT", ends=True),
    ]
    code = Code.of(listing, Resources(8, 0), 16)
    assert (code.loop, code.stores) == (3, {16: 2})
    assert Code.of(listing, Resources(8, 0), 4).loop == 0


# ---- judging


@pytest.mark.parametrize(
    ("sass", "usage", "fault"),
    [
        (GOOD.replace("STG.E.128", "STG.E.64"), USAGE, r"stores of \{8: 2\}"),
        (GOOD.replace("LDG.E.128", "LDG.E.64"), USAGE, "0 loads of 16 bytes in the loop, want 2"),
        (GOOD.replace("IMAD.WIDE R4, R8, 0x10, R4", "STL [R1], R4"), USAGE, "1 spills"),
        (GOOD.replace("IMAD.WIDE R4, R8, 0x10, R4", "LDL R4, [R1]"), USAGE, "1 spills"),
        (GOOD, USAGE.replace("STACK:0", "STACK:8"), "8 bytes of local memory"),
        (GOOD, USAGE.replace("LOCAL:0", "LOCAL:16"), "16 bytes of local memory"),
        (GOOD, USAGE.replace("REG:48", "REG:129"), "129 registers, over 128"),
        (GOOD.replace("LDC R1", "STG.E.128 [R1], R1"), USAGE, ""),
        (GOOD.replace("IMAD.WIDE R4, R8, 0x10, R4", "STG.E.128 [R4.64], R8"), USAGE, "3 stores of 16 bytes"),
        (GOOD.replace("IMAD.WIDE R4", "IMAD.WIDE R4, R8 ;\n        /*0118*/  IADD3 R4" * 60), USAGE, "over 30"),
        (GOOD.replace("IMAD.WIDE R4, R8, 0x10, R4", "CALL.REL.NOINC `($div)"), USAGE, "1 calls in the loop"),
    ],
)
def test_bad_kernels_are_refused(sass: str, usage: str, fault: str) -> None:
    found = judged(nvidia_code(sass, usage))
    assert any(re.search(fault, each) for each in found) if fault else found == ()


@pytest.mark.parametrize(
    ("assembly", "fault"),
    [
        (AMD.replace("store_dwordx4", "store_dwordx2"), "stores of {8: 1}"),
        (AMD.replace("load_dwordx4", "load_dwordx2"), "0 loads of 16 bytes"),
        (AMD.replace("s_or_b64 exec", "scratch_store_dword off, v0 ;"), "1 spills"),
        (AMD.replace(".vgpr_spill_count: 0", ".vgpr_spill_count: 3"), "3 spills"),
        (AMD.replace(".sgpr_spill_count: 0", ".sgpr_spill_count: 2"), "2 spills"),
        (AMD.replace("_fixed_size: 0", "_fixed_size: 64"), "64 bytes of local memory"),
        (AMD.replace(".vgpr_count:     44", ".vgpr_count:     200"), "200 registers"),
    ],
)
def test_bad_kernels_of_amds_are_refused(assembly: str, fault: str) -> None:
    code = Code.of(amd.instructions(assembly), amd.resources(assembly), 16)
    (found,) = judged(code, target="gfx942", per_turn=1)
    assert fault in found


def test_narrow_variants_may_have_wide_stores_beside_theirs_and_nothing_else() -> None:
    code = Code(registers=56, local_bytes=0, spills=0, loads={4: 9, 16: 4}, stores={4: 4, 16: 4}, loop=160)
    assert judged(code, name="rows-4-gather", width=4, per_turn=4) == ()
    code = dataclasses.replace(code, stores={1: 16, 4: 4})
    assert "stores of {1: 16}" in judged(code, name="rows-4-gather", width=4, per_turn=4)[0]
    code = dataclasses.replace(code, stores={}, loads={8: 3})
    assert "no access of 4 bytes" in judged(code, name="clear", width=4, per_turn=4)[-1]


def test_instruction_caps_are_of_one_target_and_of_variants_that_are_there() -> None:
    code = Code(registers=56, local_bytes=0, spills=0, loads={16: 2}, stores={16: 2}, loop=91)
    assert "45.5 instructions" in judged(code, name="planes-nhd-256-gather+sum")[0]
    assert judged(code, name="planes-nhd-256-gather+sum", target="sm_100") == ()
    assert judged(dataclasses.replace(code, loop=90), name="planes-nhd-256-gather+sum") == ()
    assert rules.missing_caps(["rows-16-gather"]) == sorted(rules.INSTRUCTION_CAPS.keys() - {"rows-16-gather"})


# ---- the command


def test_a_kernel_without_its_alignment_is_refused_and_one_with_it_is_not() -> None:
    """Really compiled, in a process of its own, for a device that is not here."""
    good, bad = compiled("sm_90", ("tests.bench.small_kernels",))
    assert (good.name, good.faults, list(good.code.stores)) == ("good", (), [16])
    assert bad.name == "bad" and any("stores of" in fault for fault in bad.faults)
    assert good.code.loop and good.per_16_bytes and good.triton.startswith("3.")


def test_a_process_that_fails_is_no_pass() -> None:
    with pytest.raises(
        UnreadableError, match="compiling for sm_90 failed:(.|\n)*No module named 'tests.bench.nothing'"
    ):
        compiled("sm_90", ("tests.bench.nothing",))


def fake(name: str, target: str = "sm_90", **other: Any) -> Compiled:
    code = Code(registers=40, local_bytes=0, spills=0, loads={16: 2}, stores={16: 2}, loop=42)
    return Compiled(
        **({"name": name, "target": target, "width": 16, "per_turn": 2, "code": code, "triton": "3"} | other)
    )


def test_the_command_fails_for_each_reason_and_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(rules.INSTRUCTION_CAPS)
    found = {target: [fake(name, target) for name in names] for target in rules.TARGETS}
    monkeypatch.setattr(command, "compiled", found.__getitem__)
    monkeypatch.setattr(page, "PAGE", tmp_path / "kernels.md")
    assert command.main([]) == 1 and "is not there" in capsys.readouterr().err
    assert command.main(["--write"]) == 0
    assert (
        "| `rows-16-gather` | 16 | 40, 21.0 | 40, 21.0 | 40, 21.0 | 40, 21.0 | 2×16 | 2×16 | 0 |"
        in page.PAGE.read_text()
    )
    assert command.main([]) == 0 and "`rows-16-gather`" in capsys.readouterr().out
    found["sm_80"].append(fake("new", "sm_80"))
    assert command.main([]) == 1 and "lacks ['new']" in capsys.readouterr().err
    found["sm_80"].pop()
    found["sm_80"][0] = fake(names[0], "sm_80", faults=("it is bad",))
    assert command.main([]) == 1 and f"{names[0]} for sm_80: it is bad" in capsys.readouterr().err
    for target in rules.TARGETS:
        found[target] = found[target][1:]
    assert (
        command.main(["--target", "sm_80"]) == 1
        and f"no variant {names[0]}, which has a cap" in capsys.readouterr().err
    )
    page.PAGE.write_text("nothing")
    assert command.main([]) == 1 and "no variant in" in capsys.readouterr().err
