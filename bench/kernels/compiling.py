"""Compiles variants for a target, in a process of its own: kernels are decorated once, here for the compiler.

`python -m bench.kernels.compiling TARGET MODULE...` prints one JSON object; each module has `variants()`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.kernels import amd, nvidia, rules
from bench.kernels.code import Code, Compiled, UnreadableError

__all__ = ["MODULES", "compiled"]

MODULES = ("kvxfer.convert.launch", "kvxfer.convert.launch_rows")
TIMEOUT_S = 3600.0  # of a process that takes a minute: on a machine that does much else besides
_ROOT = Path(__file__).resolve().parents[2]


def compiled(target: str, modules: Sequence[str] = MODULES) -> list[Compiled]:
    """Every variant of these modules, and its faults.

    Raises:
        UnreadableError: the process failed, or something that it printed is not understood; no variant was there.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": cache,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        done = subprocess.run(
            [sys.executable, "-m", "bench.kernels.compiling", target, *modules],
            capture_output=True, text=True, env=environment, timeout=TIMEOUT_S,
        )  # fmt: skip
    if done.returncode:
        raise UnreadableError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    if not answer["variants"]:
        raise UnreadableError(f"no variant in {', '.join(modules)}")
    return [_judged(Compiled(code=_code(each.pop("code")), triton=answer["triton"], **each))
            for each in answer["variants"]]  # fmt: skip


def _judged(one: Compiled) -> Compiled:
    return dataclasses.replace(one, faults=rules.faults(one))


def _code(raw: dict[str, Any]) -> Code:
    widths = {name: {int(width): count for width, count in raw[name].items()} for name in ("loads", "stores")}
    return Code(**(raw | widths))


# ---- in the process


def main(target: str, modules: Sequence[str]) -> None:
    """Prints what became of the modules' variants."""
    import triton

    answer: dict[str, Any] = {"triton": triton.__version__, "variants": []}
    for module in modules:
        for variant in importlib.import_module(module).variants():
            try:
                one = _compile(variant, target)
            except UnreadableError as exc:
                raise UnreadableError(f"{variant.name} for {target}: {exc}") from exc
            answer["variants"].append(dataclasses.asdict(one) | {"faults": ()})
            answer["variants"][-1].pop("triton")
    print(json.dumps(answer))


def _compile(variant: Any, target: str) -> Compiled:
    """One variant for one target, not judged."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    is_nvidia = target.startswith("sm_")
    warp = 32 if is_nvidia else 64
    made = triton.compile(
        ASTSource(variant.kernel, variant.signature, variant.constexprs, variant.attrs),
        target=GPUTarget("cuda", int(target[3:]), warp) if is_nvidia else GPUTarget("hip", target, warp),
        options={"num_warps": variant.num_warps},
    )
    if is_nvidia:
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            listing = nvidia.instructions(_run(tools / "nvdisasm", "-c", file.name))
            resources = nvidia.resources(_run(tools / "cuobjdump", "-res-usage", file.name))
    else:
        listing, resources = amd.instructions(made.asm["amdgcn"]), amd.resources(made.asm["amdgcn"])
    return Compiled(
        name=variant.name,
        target=target,
        width=variant.sector,
        per_turn=variant.tile_bytes / (variant.sector * variant.num_warps * warp),
        code=Code.of(listing, resources, variant.sector),
    )


def _run(tool: Path, *arguments: str) -> str:
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise UnreadableError(f"{tool.name} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
