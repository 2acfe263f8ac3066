"""What the device and its link can do: one large copy on the device, from pinned memory, and to it."""

from __future__ import annotations

from typing import Any

import torch

from bench.gpu.lane import Case, measure
from bench.gpu.sections import Work
from bench.gpu.settings import Settings
from kvxfer.device.copy_bench import POISON, Lane

__all__ = ["DEVICE", "FROM_HOST", "TO_HOST", "run"]

DEVICE, FROM_HOST, TO_HOST = "device copy", "H2D copy", "D2H copy"


def run(work: Work) -> None:
    """Three rows, kept for others to be compared with."""
    settings: Settings = work.common.settings
    lane = Lane(settings.device)
    generator = torch.Generator().manual_seed(1)
    host = lane.pinned(settings.link_bytes)
    host.copy_(torch.randint(256, (settings.link_bytes,), dtype=torch.uint8, generator=generator))
    other = lane.pinned(settings.link_bytes)
    device = lane.empty(settings.link_bytes)
    times = max(1, settings.device_bytes // settings.link_bytes)
    source = host.to(settings.device).repeat(times)
    target = torch.empty_like(source)

    def row(name: str, to: Any, what: Any) -> None:
        if work.over(name):
            return
        want = what.clone()
        case = Case(
            case=name,
            impl="torch copy_",
            step=lambda: to.copy_(what, non_blocking=True),
            poison=lambda: to.fill_(POISON),
            check=lambda: None if torch.equal(to, want) else "the copy differs",
            nbytes=what.numel(),
        )
        measure(work, lane, case, keep=name)

    row(DEVICE, target, source)
    row(FROM_HOST, device, host)
    row(TO_HOST, other, source[: settings.link_bytes])
