"""How much a matrix product slows down while chunks are packed beside it, and with how many programs."""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch

from bench.gpu.copies import checked
from bench.gpu.sections import Work
from bench.gpu.settings import Settings
from kvxfer.device.copy_bench import CopyBench, Lane

__all__ = ["run"]

PRODUCTS, ROUNDS = 20, 3
FRAGMENT = 256  # a head of a token: the kernel's hardest common case


class Products:
    """Matrix products on a stream of their own, and the answer that they must keep giving."""

    def __init__(self, settings: Settings) -> None:
        self.lane = Lane(settings.device)
        kind = torch.bfloat16 if self.lane.on_device else torch.float32
        generator = torch.Generator().manual_seed(2)
        shape = (settings.matrix, settings.matrix)
        self.a, self.b = (
            torch.randint(-2, 3, shape, generator=generator).to(settings.device, kind) for _ in range(2)
        )  # fmt: skip
        self.out = torch.empty_like(self.a)
        self.lane.once(self.step)
        self.want = self.out.clone()

    def step(self) -> None:
        """One product."""
        torch.matmul(self.a, self.b, out=self.out)

    def check(self) -> str | None:
        """Compares the last product with the first."""
        return None if torch.equal(self.out, self.want) else "the product differs"


def run(work: Work) -> None:
    """Stores and loads by pack and by zero, at several caps on the programs."""
    settings: Settings = work.common.settings
    products, bench = Products(settings), CopyBench(settings.device)
    fragments = settings.filled_bytes // FRAGMENT // 16 * 16
    bench.prepare(FRAGMENT, fragments)
    alone = statistics.median(products.lane.seconds(products.step, PRODUCTS) for _ in range(ROUNDS))
    work.add("matrix product alone", f"{settings.matrix}", ms=alone * 1e3)
    for engine, direction in (("pack", "store"), ("zero", "store"), ("pack", "load"), ("zero", "load")):
        for programs in settings.programs:
            name = f"{direction}, {engine}, {'all' if programs is None else programs} programs"
            if not work.over(name):
                _both(work, products, bench, engine, direction, programs, alone, name)
    bench.close()


def _both(
    work: Work, products: Products, bench: CopyBench, engine: str, direction: str, programs: int | None, alone: float,
    name: str,
) -> None:  # fmt: skip
    assert bench.work is not None
    step = bench.step(engine, direction, programs)
    bench.poison(direction)
    bench.lane.once(step)
    by_itself = bench.lane.seconds(step, 3)
    repeats = max(1, math.ceil(1.5 * PRODUCTS * alone / by_itself))  # it goes on until the products are done
    bench.poison(direction)
    rounds = [together(products, bench.lane, step, repeats) for _ in range(ROUNDS)]
    if why := checked(bench, direction) or products.check():
        work.wrong(name, "beside a product", why)
        return
    product, copy = (statistics.median(times) for times in zip(*rounds, strict=True))
    work.add(
        name, "beside a product", GBps=bench.work.nbytes / copy / 1e9, ms=product * 1e3,
        percent=100 * alone / product, of="the product's speed alone",
        more={"slowdown": round(product / alone, 4), "GBps_alone": round(bench.work.nbytes / by_itself / 1e9, 2)},
    )  # fmt: skip


def together(products: Products, lane: Lane, step: Any, repeats: int) -> tuple[float, float]:
    """Seconds of one product, and of one step, while both streams are busy."""
    if not lane.on_device:
        return products.lane.seconds(products.step, PRODUCTS), lane.seconds(step, repeats)
    lane.synchronize()
    begin, end, product_begin, product_end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    with lane.current():
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
    with products.lane.current():  # which come second, so that none of them has the device to itself
        product_begin.record()
        for _ in range(PRODUCTS):
            products.step()
        product_end.record()
    lane.synchronize()
    product, copies = product_begin.elapsed_time(product_end), begin.elapsed_time(end)
    return product / 1e3 / PRODUCTS, copies / 1e3 / repeats
