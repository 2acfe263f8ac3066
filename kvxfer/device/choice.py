"""Which runner moves which pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device
from kvxfer.device.host_carrier import HostCarrier
from kvxfer.device.runner import DeviceRunner
from kvxfer.errors import LayoutError
from kvxfer.io.modes import in_memory
from kvxfer.jobs import Runner, runner_of
from kvxfer.slot import SlotLayout

__all__ = ["runner_over"]


def runner_over(
    config: EngineConfig, slot: SlotLayout, pages: Sequence[KVPages], device: Device | None, root: Path
) -> tuple[Runner, int]:
    """The runner for these pages, and the most bytes that its threads' buffers in host memory take together.

    Args:
        slot: of the chunks that it will move.
        device: None: the one that has the pages.
        root: of the store.

    Raises:
        ConfigError: staging_bytes holds no buffer for such a slot.
        LayoutError: the pages are on several devices, or not on `device`.
        DeviceMemoryError: the device has no memory for one bay.
        DeviceError
    """
    device, memory = device or _device_of(pages), in_memory(root)
    if device is None:
        return runner_of(config, slot, memory=memory)
    carrier = HostCarrier(device, config, slot, memory=memory)
    try:
        return DeviceRunner(device, carrier, pages, config), carrier.staging_limit
    except BaseException:
        carrier.shutdown(0)
        raise


def _device_of(pages: Sequence[KVPages]) -> Device | None:
    """The device of these pages; None for host memory."""
    labels = {str(getattr(mine, "device", "cpu")) for mine in pages}
    if labels == {"cpu"}:
        return None
    if len(labels) > 1:
        raise LayoutError(f"the pages of one engine are on several devices: {sorted(labels)}")
    from kvxfer.device.torch_device import TorchDevice  # takes torch, which is there if its tensors are

    return TorchDevice(labels.pop())
