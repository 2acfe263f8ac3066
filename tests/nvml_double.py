"""A double of pynvml, installed under that name for children. FAKE_NVML says what it answers, as JSON:

`gpus`: what each tells otherwise than GPU below, by function; a text is the error that it raises, "hang" never returns.
`init`: the same for nvmlInit. `exit`: which sample ends the process.
"""

import json
import os
import time
import types

NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

GPU = {
    "Name": "Fake H200", "UUID": "GPU-1", "PciInfo": "00000000:3B:00.0", "MemoryInfo": [141 << 30, 100 << 30],
    "BAR1MemoryInfo": [256 << 30, 1 << 30, 255 << 30], "CurrPcieLinkGeneration": 5, "CurrPcieLinkWidth": 16,
    "MaxPcieLinkGeneration": 5, "MaxPcieLinkWidth": 16, "GpuMaxPcieLinkGeneration": 5, "PcieThroughput": [7, 9],
    "HandleByIndex": None,
}  # fmt: skip


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


_samples = 0


def _told():
    return json.loads(os.environ.get("FAKE_NVML", "{}"))


def _answer(said):
    if said == "hang":
        time.sleep(1000)
    if isinstance(said, str) and said.startswith("!"):
        raise NVMLError_NotSupported(said[1:])
    return said


def _ask(name, handle):
    return _answer((GPU | _told().get("gpus", [{}])[handle])[name])


def nvmlInit():
    _answer(_told().get("init"))


def nvmlSystemGetDriverVersion():
    return b"580.1"


def nvmlDeviceGetCount():
    global _samples
    _samples += 1
    told = _told()
    if _samples == told.get("exit"):
        os._exit(3)
    if _samples == told.get("wedge"):
        time.sleep(1000)
    return len(told.get("gpus", [{}]))


def nvmlDeviceGetHandleByIndex(index):
    _ask("HandleByIndex", index)
    return index


def nvmlDeviceGetName(handle):
    return _ask("Name", handle)


def nvmlDeviceGetUUID(handle):
    return _ask("UUID", handle).encode()


def nvmlDeviceGetPciInfo(handle):
    return types.SimpleNamespace(busId=_ask("PciInfo", handle).encode())


def nvmlDeviceGetMemoryInfo(handle, version=None):
    total, free = _ask("MemoryInfo", handle)
    return types.SimpleNamespace(total=total, free=free, used=total - free)


def nvmlDeviceGetBAR1MemoryInfo(handle):
    total, used, free = _ask("BAR1MemoryInfo", handle)
    return types.SimpleNamespace(bar1Total=total, bar1Used=used, bar1Free=free)


def nvmlDeviceGetCurrPcieLinkGeneration(handle):
    return _ask("CurrPcieLinkGeneration", handle)


def nvmlDeviceGetCurrPcieLinkWidth(handle):
    return _ask("CurrPcieLinkWidth", handle)


def nvmlDeviceGetMaxPcieLinkGeneration(handle):
    return _ask("MaxPcieLinkGeneration", handle)


def nvmlDeviceGetMaxPcieLinkWidth(handle):
    return _ask("MaxPcieLinkWidth", handle)


def nvmlDeviceGetGpuMaxPcieLinkGeneration(handle):
    return _ask("GpuMaxPcieLinkGeneration", handle)


def nvmlDeviceGetPcieThroughput(device, counter):
    return _ask("PcieThroughput", device)[counter]
