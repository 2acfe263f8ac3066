"""The few calls of the CUDA driver that kvikio leaves to its caller: whose memory an address is, and being there.

Only made once `probe.cuda()` has answered ok. Addresses and sizes in bytes.
"""

from __future__ import annotations

import ctypes as C
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import DeviceError, DeviceMemoryError

_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_OUT_OF_MEMORY = 2


class Cuda(Protocol):
    """What `GdsBackend` asks of the driver."""

    def enter(self, address: int) -> None:
        """Makes the context of this memory's device the calling thread's. DeviceError where it is no device's."""

    def locate(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that the address is in. DeviceError where there is none."""


class LibCuda:
    """`Cuda`, through libcuda.

    Raises:
        DeviceError: no library, or it refuses.
    """

    def __init__(self) -> None:
        try:
            self._lib = C.CDLL("libcuda.so.1")
        except OSError as exc:
            raise DeviceError(f"libcuda.so.1: {exc}") from exc
        self._contexts: dict[int, C.c_void_p] = {}
        self.call("cuInit", C.c_uint(0))

    def call(self, name: str, *arguments: Any) -> None:
        """One call; DeviceError with the driver's name for what it answers."""
        code = int(getattr(self._lib, name)(*arguments))
        if not code:
            return
        text = C.c_char_p()
        known = self._lib.cuGetErrorName(C.c_int(code), C.byref(text)) == 0 and text.value
        message = f"{name} answers {text.value.decode() if known and text.value else 'an error'} ({code})"
        raise DeviceMemoryError(message) if code == _OUT_OF_MEMORY else DeviceError(message)

    def enter(self, address: int) -> None:
        """See Cuda."""
        ordinal = C.c_int(-1)
        self.call("cuPointerGetAttribute", C.byref(ordinal), C.c_int(_DEVICE_ORDINAL), C.c_uint64(address))
        self.enter_device(ordinal.value)

    def enter_device(self, ordinal: int) -> None:
        """Makes a device's primary context, which is what frameworks use, the calling thread's."""
        if (context := self._contexts.get(ordinal)) is None:
            context = C.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", C.byref(context), C.c_int(ordinal))
            self._contexts[ordinal] = context
        self.call("cuCtxSetCurrent", context)

    def locate(self, address: int) -> tuple[int, int]:
        """See Cuda."""
        base, nbytes = C.c_uint64(), C.c_size_t()
        self.call("cuMemGetAddressRange_v2", C.byref(base), C.byref(nbytes), C.c_uint64(address))
        return base.value, nbytes.value


class CudaMemory:
    """`ladder.DeviceMemory` and more of one device, for a process that has no framework. Every call waits."""

    def __init__(self, cuda: LibCuda, ordinal: int = 0) -> None:
        self.cuda = cuda
        self._ordinal = ordinal

    def alloc(self, nbytes: int) -> int:
        """The address of new memory. DeviceMemoryError where there is not as much."""
        self.cuda.enter_device(self._ordinal)
        address = C.c_uint64()
        self.cuda.call("cuMemAlloc_v2", C.byref(address), C.c_size_t(nbytes))
        return address.value

    def fill(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copies host bytes there."""
        self.cuda.enter_device(self._ordinal)
        source = C.c_void_p(data.ctypes.data)
        self.cuda.call("cuMemcpyHtoD_v2", C.c_uint64(address), source, C.c_size_t(data.nbytes))

    def fetch(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of its bytes."""
        data = np.empty(nbytes, np.uint8)
        self.fetch_into(address, data)
        return data

    def fetch_into(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copies its bytes to host memory."""
        self.cuda.enter_device(self._ordinal)
        self.cuda.call("cuMemcpyDtoH_v2", C.c_void_p(data.ctypes.data), C.c_uint64(address), C.c_size_t(data.nbytes))

    def pin(self, data: NDArray[np.uint8]) -> str:
        """Makes host memory fast to copy from and to; why not, where it cannot."""
        self.cuda.enter_device(self._ordinal)
        place, size = C.c_void_p(data.ctypes.data), C.c_size_t(data.nbytes)
        try:
            self.cuda.call("cuMemHostRegister_v2", place, size, C.c_uint(0))
        except DeviceError as exc:
            return str(exc)
        return ""

    def unpin(self, data: NDArray[np.uint8]) -> None:
        """Undoes it."""
        self.cuda.enter_device(self._ordinal)
        self.cuda.call("cuMemHostUnregister", C.c_void_p(data.ctypes.data))

    def bus(self) -> str:
        """Where the device is, of PCI: "0000:3B:00.0"."""
        text = C.create_string_buffer(32)
        self.cuda.call("cuDeviceGetPCIBusId", text, C.c_int(len(text)), C.c_int(self._ordinal))
        return text.value.decode()

    def free(self, address: int) -> None:
        """Gives it back."""
        self.cuda.enter_device(self._ordinal)
        self.cuda.call("cuMemFree_v2", C.c_uint64(address))
