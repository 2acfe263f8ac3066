"""launch.py under the face of the host's converters: numpy in, numpy out, in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvxfer.convert import launch
from kvxfer.convert.pages import KVPages, check_gather, check_scatter
from kvxfer.mapping import CanonicalMapping


def on_triton(name: str) -> OnTriton:
    """The converter of this name, or a skip that says why it is not here."""
    if name == "triton":
        if not launch.INTERPRETED:
            pytest.skip("kernels are compiled in this run; -m 'not gpu' interprets them")
        return OnTriton("cpu")
    if not torch.cuda.is_available():
        pytest.skip("compiled kernels need a CUDA device, and torch sees none")
    if launch.INTERPRETED:
        pytest.skip("kernels are interpreted in this run (TRITON_INTERPRET=1)")
    return OnTriton("cuda:0")


@dataclass(frozen=True)
class OnTriton:
    """Arguments are checked as a caller of launch.py must, and moved to the device and back where that is another."""

    device: str
    programs: int | None = None

    def gather(
        self,
        pages: KVPages,
        block_ids: NDArray[np.int64],
        mapping: CanonicalMapping,
        out: NDArray[np.uint8],
        sums: NDArray[np.uint64] | None = None,
    ) -> None:
        check_gather(pages, block_ids, mapping, out, sums)
        target, numbers = self.up(out), None if sums is None else self.up(sums)
        ids = self.up(np.ascontiguousarray(block_ids))
        launch.gather(self.pages(pages), ids, mapping, target, numbers, programs=self.programs)
        self.down(target, out)
        self.down(numbers, sums)

    def scatter(
        self,
        src: NDArray[np.uint8],
        block_ids: NDArray[np.int64],
        mapping: CanonicalMapping,
        pages: KVPages,
        sums: NDArray[np.uint64] | None = None,
    ) -> None:
        check_scatter(pages, block_ids, mapping, src, sums)
        there, numbers = self.pages(pages), None if sums is None else self.up(sums)
        ids = self.up(np.ascontiguousarray(block_ids))
        launch.scatter(self.up(src), ids, mapping, there, numbers, programs=self.programs)
        self.down(numbers, sums)
        for number, tensor in enumerate(there.tensors if there is not pages else ()):
            self.down(tensor, pages.flat(number))

    def checksum(self, src: NDArray[np.uint8], mapping: CanonicalMapping, sums: NDArray[np.uint64]) -> None:
        numbers = self.up(sums)
        launch.checksum(self.up(src), mapping, numbers, programs=self.programs)
        self.down(numbers, sums)

    def pages(self, pages: KVPages) -> KVPages:
        """The same pages on the device."""
        if self.device == "cpu":
            return pages
        tensors = [self.up(pages.flat(number)) for number in range(len(pages.tensors))]
        return KVPages(pages.mapping, tensors, pages.num_blocks)

    def up(self, array: NDArray[Any]) -> Any:
        """The array on the device: itself, where that is the host and it may be written."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)

    def down(self, tensor: Any, array: NDArray[Any] | None) -> None:
        if array is not None and self.device != "cpu":
            array[...] = tensor.cpu().numpy()
