"""Host memory beside a device's, by the driver's own calls. (Allocations, copies and contexts: test_ladder.py.)"""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np

from kvxfer.errors import DeviceError
from kvxfer.io.libcuda import CudaMemory


class Driver:
    """LibCuda's two calls: arguments are kept as the driver would get them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refused = ""

    def enter_device(self, ordinal: int) -> None:
        self.calls.append(("enter", ordinal))

    def call(self, name: str, *arguments: Any) -> None:
        wide = (C.c_uint64, C.c_size_t, C.c_void_p)  # an int would be cut to 32 bits
        assert all(isinstance(each, (*wide, C.c_int, C.c_uint, C.Array)) for each in arguments)
        assert all(isinstance(each, wide) for each in arguments if each.value == 8192)
        if name == "cuDeviceGetPCIBusId":
            arguments[0].value = b"0000:3b:00.0"
        self.calls.append((name, *(each.value for each in arguments)))
        if name == self.refused:
            raise DeviceError(f"{name} answers CUDA_ERROR_INVALID_VALUE (1)")


def test_host_memory_is_pinned_and_unpinned() -> None:
    driver, data = Driver(), np.zeros(8192, np.uint8)
    memory = CudaMemory(driver, 1)
    assert memory.pin(data) == ""
    memory.unpin(data)
    at = data.ctypes.data
    pinned, unpinned = ("cuMemHostRegister_v2", at, 8192, 0), ("cuMemHostUnregister", at)
    assert driver.calls == [("enter", 1), pinned, ("enter", 1), unpinned]
    driver.refused = "cuMemHostRegister_v2"
    assert memory.pin(data) == "cuMemHostRegister_v2 answers CUDA_ERROR_INVALID_VALUE (1)"


def test_bytes_come_to_where_the_host_wants_them() -> None:
    driver, data = Driver(), np.zeros(100, np.uint8)
    CudaMemory(driver).fetch_into(1 << 40, data)
    assert driver.calls == [("enter", 0), ("cuMemcpyDtoH_v2", data.ctypes.data, 1 << 40, 100)]


def test_where_the_device_is() -> None:
    driver = Driver()
    assert CudaMemory(driver, 1).bus() == "0000:3b:00.0"
    assert driver.calls == [("cuDeviceGetPCIBusId", b"0000:3b:00.0", 32, 1)]
