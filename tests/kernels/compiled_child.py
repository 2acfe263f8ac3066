"""Calls launch.py with kernels that are compiled for sm_90 and not run. Prints what became of each launch.

A process of its own: whether kernels are interpreted is settled when they are imported.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from kvxfer.convert import kernels, launch
from kvxfer.convert.pages import KVPages
from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.layout import PageLayout, kvx1_mapping
from kvxfer.mapping import LocalTensor
from kvxfer.opaque import opaque_mapping


class NoDriver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")


class Compiled:
    """Stands where launch.py has its kernels: all of a launch but the launch."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.seen: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        class Grid:
            def __getitem__(_, grid: tuple[int, ...]) -> Any:
                def call(*args: Any, **kwargs: Any) -> None:
                    compiled = getattr(kernels, name).run(*args, grid=grid, warmup=True, **kwargs)
                    if not any(compiled is each for each in self.seen):
                        self.seen.append(compiled)
                    self.launches.append(
                        {
                            "kernel": name,
                            "binary": next(n for n, each in enumerate(self.seen) if each is compiled),
                            "signature": compiled.src.signature,
                            "wide": "ld.global.v4.b32" in compiled.asm["ptx"],
                        }
                    )

                return call

        return Grid()


def main() -> None:
    """Gathers of regular pages, of one chunk and of several, of irregular ones; sums alone."""
    triton.runtime.driver.set_active(NoDriver())
    recorder = Compiled()
    setattr(launch, "kernels", recorder)  # noqa: B010
    launch.INTERPRETED = True  # host memory stands for the device's: nothing is run
    geometry = KVGeometry(num_layers=1, num_kv_heads=8, head_dim=128, dtype="bfloat16", tokens_per_block=16)
    regular = kvx1_mapping(geometry, ShardSpec(), PageLayout.nhd(geometry, 8))
    irregular = opaque_mapping([LocalTensor(block_stride=n, page_bytes=n) for n in (64, 4800)], ShardSpec())
    for mapping in (regular, irregular):
        tensors = [np.zeros(16 * local.block_stride, np.uint8) for local in mapping.tensors]
        pages = KVPages(mapping, tensors, 16)
        for chunks in (1, 16, 5):  # what Triton would make binaries of their own for
            ids = torch.zeros((chunks, 1), dtype=torch.int64)
            memory = torch.zeros(chunks * mapping.slot.payload_stride + 4096, dtype=torch.uint8)
            memory = memory[-memory.data_ptr() % 4096 :][: chunks * mapping.slot.payload_stride]
            stage = memory.view(chunks, -1)
            sums = torch.zeros((chunks, mapping.slot.num_segments), dtype=torch.int64)
            launch.gather(pages, ids, mapping, stage, sums)
            launch.checksum(stage, mapping, sums)
    setattr(launch, "kernels", kernels)  # noqa: B010
    variants = {each.name: each.signature for each in launch.variants()}
    print(json.dumps({"launches": recorder.launches, "variants": variants}))


if __name__ == "__main__":
    main()
