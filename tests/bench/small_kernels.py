"""A kernel that copies through addresses, as it should be and without its alignment asserted: for test_kernels.py."""

from types import SimpleNamespace

import triton
import triton.language as tl


@triton.jit
def copy(table, count: tl.int32, ALIGNED: tl.constexpr):
    for turn in range(count):
        lane = turn * 256 + tl.arange(0, 256)
        source = (tl.load(table) + lane * 16).to(tl.pointer_type(tl.int32))
        target = (tl.load(table + 1) + lane * 16).to(tl.pointer_type(tl.int32))
        if ALIGNED:
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        word = tl.arange(0, 4)[None, :]
        tl.store(target[:, None] + word, tl.load(source[:, None] + word))


def variants():
    for name, aligned in (("good", True), ("bad", False)):
        signature = {"table": "*i64", "count": "i32", "ALIGNED": "constexpr"}
        constexprs = {"ALIGNED": aligned}
        yield SimpleNamespace(
            name=name, kernel=copy, signature=signature, constexprs=constexprs, attrs={}, num_warps=4, sector=16,
            tile_bytes=4096,
        )  # fmt: skip
