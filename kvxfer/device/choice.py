"""Which runner moves which pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvxfer.config import EngineConfig
from kvxfer.convert.pages import KVPages
from kvxfer.device.base import Device
from kvxfer.device.carrier import Carrier
from kvxfer.device.engines import calibrated
from kvxfer.device.gds_carrier import DeviceTrial, GdsCarrier, backend_for
from kvxfer.device.host_carrier import HostCarrier
from kvxfer.device.runner import DeviceRunner
from kvxfer.errors import LayoutError
from kvxfer.io.ladder import Rung, Step, climb
from kvxfer.io.modes import in_memory
from kvxfer.jobs import Runner, runner_of
from kvxfer.slot import SlotLayout

__all__ = ["runner_over"]


def runner_over(
    config: EngineConfig,
    slot: SlotLayout,
    pages: Sequence[KVPages],
    device: Device | None,
    root: Path,
    backend: str = "posix",
) -> tuple[Runner, int]:
    """The runner for these pages, and the most bytes that its threads' buffers in host memory take together.

    Args:
        slot: of the chunks that it will move.
        device: None: the one that has the pages.
        root: of the store.
        backend: of the store, for what goes through host memory: posix or uring.

    Raises:
        ConfigError: staging_bytes holds no buffer for such a slot, or what `config.gds` wants does not work, or
            KVXFER_COPY_ENGINE names none of host_carrier.ENGINES.
        LayoutError: the pages are on several devices, or not on `device`.
        DeviceMemoryError: the device has no memory for one bay.
        WrongBytes: the copy engine that is wanted, or every one, moves wrong bytes on this device.
        DeviceError
    """
    device, memory = device or _device_of(pages, config.programs), in_memory(root)
    if device is None:
        return runner_of(config, slot, memory=memory, backend=backend)
    carrier, limit = _carrier(device, config, slot, root, memory, backend)
    try:
        return DeviceRunner(device, carrier, pages, config), limit
    except BaseException:  # whatever it is, it goes on to the caller, and the carrier's threads end
        carrier.shutdown(0)
        raise


def _carrier(
    device: Device, config: EngineConfig, slot: SlotLayout, root: Path, memory: bool, backend: str
) -> tuple[Carrier, int]:
    """By the way that the ladder found for this root, and the bytes that its threads' buffers take."""
    rung: Rung | None = None
    if memory:
        rung = Rung("host", (Step("file", "direct and compat off: files are pages of memory, there is no drive"),))
    elif device.label.startswith("cuda"):
        rung = climb(root, DeviceTrial(device), want=config.gds)
    if rung is None or (gds := backend_for(rung, config)) is None:
        choose = calibrated(device.label, config.copy_engine).choose
        host = HostCarrier(device, config, slot, memory=memory, choose=choose, backend=backend)
        host.rung = rung
        return host, host.staging_limit
    carrier = GdsCarrier(device, gds, config)
    carrier.rung = rung
    return carrier, 0


def _device_of(pages: Sequence[KVPages], programs: int | None) -> Device | None:
    """The device of these pages; None for host memory."""
    labels = {str(getattr(mine, "device", "cpu")) for mine in pages}
    if labels == {"cpu"}:
        return None
    if len(labels) > 1:
        raise LayoutError(f"the pages of one engine are on several devices: {sorted(labels)}")
    from kvxfer.device.torch_device import TorchDevice  # takes torch, which is there if its tensors are

    return TorchDevice(labels.pop(), programs=programs)
