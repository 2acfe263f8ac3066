"""ctypes face of libkvx_cuda: the declarations of csrc/cuda/cuda_batch.h, and a class that raises their errors.

The library is built where nvcc is found and loaded only where a device has answered: `available` first.
"""

from __future__ import annotations

import ctypes as C
import os
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import DeviceError, DeviceMemoryError, NativeError
from kvxfer.probe import Probe

ABI_VERSION = 1
PIECE_BYTES = 256 << 20  # pinned by one call
BATCH, LOOP = 1, 2  # kvx_cuda_how
HOW = {0: "nothing", BATCH: "batch", LOOP: "loop"}
MEMORY = ("pageable", "pinned", "device", "managed")  # kvx_cuda_memory
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class DeviceStruct(C.Structure):
    """kvx_cuda_device."""

    _fields_ = [
        ("name", C.c_char * 256), ("uuid", C.c_uint8 * 16), ("total_bytes", C.c_uint64),
        ("multiprocessors", C.c_int32), ("copy_engines", C.c_int32),
    ]  # fmt: skip


class PointerStruct(C.Structure):
    """kvx_cuda_pointer."""

    _fields_ = [("memory", C.c_int32), ("device", C.c_int32), ("device_address", C.c_uint64)]


STRUCTS = {"kvx_cuda_device": DeviceStruct, "kvx_cuda_pointer": PointerStruct}

_P, _U64, _I32, _INT, _STR = C.c_void_p, C.c_uint64, C.c_int32, C.c_int, C.c_char_p

# name: (result, arguments)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvx_cuda_abi_version": (C.c_uint32, ()),
    "kvx_cuda_struct_size": (C.c_size_t, (_STR,)),
    "kvx_cuda_error_name": (_STR, (_INT,)),
    "kvx_cuda_error_text": (_STR, (_INT,)),
    "kvx_cuda_versions": (_INT, (_P, _P)),
    "kvx_cuda_device_count": (_INT, (_P,)),
    "kvx_cuda_set_device": (_INT, (_I32,)),
    "kvx_cuda_describe": (_INT, (_I32, _P)),
    "kvx_cuda_stream_new": (_INT, (_P,)),
    "kvx_cuda_stream_query": (_INT, (_U64, _P)),
    "kvx_cuda_stream_wait": (_INT, (_U64,)),
    "kvx_cuda_stream_free": (_INT, (_U64,)),
    "kvx_cuda_copy": (_INT, (_U64, _U64, _U64, _U64)),
    "kvx_cuda_copy_batch": (_INT, (_P, _P, _P, _U64, _U64, _P)),
    "kvx_cuda_host_register": (_INT, (_U64, _U64, _U64, _P)),
    "kvx_cuda_host_unregister": (_INT, (_U64, _U64, _U64)),
    "kvx_cuda_host_alloc": (_INT, (_U64, _P)),
    "kvx_cuda_host_free": (_INT, (_U64,)),
    "kvx_cuda_where": (_INT, (_U64, _P)),
}


def library_path() -> Path:
    """Where libkvx_cuda is: KVXFER_CUDA_LIBRARY if set, else beside this file."""
    return Path(os.environ.get("KVXFER_CUDA_LIBRARY") or Path(__file__).with_name("libkvx_cuda.so"))


def available(device: Probe) -> Probe:
    """Whether the library can be used, and why not. Loads it only where `device` (of `probe.cuda()`) is ok.

    `found`: `path`; where it works also `runtime` and `driver` (CUDA versions) and `devices` (a number).
    """
    path = library_path()
    found: dict[str, Any] = {"path": str(path)}
    if os.environ.get("KVXFER_CUDA") == "0":
        return Probe(False, "turned off: KVXFER_CUDA=0", found)
    if not device.ok:
        return Probe(False, f"not tried without a CUDA device: {device.why}", found)
    if not path.is_file():
        return Probe(False, f"no {path.name}: it is built where nvcc is found", found)
    try:
        cuda = load(path)
        runtime, driver = cuda.versions()
        devices = cuda.device_count()
    except (NativeError, DeviceError) as exc:
        return Probe(False, str(exc), found)
    if not devices:
        return Probe(False, "its runtime shows no device", found)
    return Probe(
        True, f"runtime {runtime}, driver {driver}", found | {"runtime": runtime, "driver": driver, "devices": devices}
    )


@cache
def load(path: Path) -> CudaRuntime:
    """The library, loaded. Only where a device has answered.

    Raises:
        NativeError: it is missing, cannot be loaded, or was built for another version of this file.
    """
    try:
        dll = C.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as exc:
        raise NativeError(f"cannot load {path.name}: {exc}; reinstall kvxfer where nvcc is found") from exc
    if (version := dll.kvx_cuda_abi_version()) != ABI_VERSION:
        raise NativeError(f"{path.name} has ABI version {version}, this kvxfer needs {ABI_VERSION}; reinstall kvxfer")
    return CudaRuntime(dll)


@dataclass(frozen=True, slots=True)
class Description:
    """One device."""

    name: str
    uuid: str  # "GPU-...", as nvidia-smi writes it
    total_bytes: int
    multiprocessors: int
    copy_engines: int


@dataclass(frozen=True, slots=True)
class Where:
    """What an address is to CUDA."""

    memory: str  # one of MEMORY
    device: int
    device_address: int  # 0: no kernel reaches it


class CudaRuntime:
    """The calls of cuda_batch.h. They are for the calling thread's device: `set_device` first, in every thread.

    Every method raises DeviceError, with CUDA's name and text of the error, DeviceMemoryError where memory ran out.
    """

    def __init__(self, dll: Any) -> None:
        self._dll = dll

    def versions(self) -> tuple[str, str]:
        """CUDA versions of the runtime linked in and of the driver; "none": there is no driver."""
        runtime, driver = C.c_int32(), C.c_int32()
        self._call("versions", C.byref(runtime), C.byref(driver))
        return _version(runtime.value), _version(driver.value)

    def device_count(self) -> int:
        """Devices."""
        count = C.c_int32()
        self._call("device_count", C.byref(count))
        return count.value

    def set_device(self, device: int) -> None:
        """For this thread."""
        self._call("set_device", device)

    def describe(self, device: int) -> Description:
        """What the runtime says of a device."""
        found = DeviceStruct()
        self._call("describe", device, C.byref(found))
        name = found.name.decode(errors="replace")
        which = f"GPU-{uuid.UUID(bytes=bytes(found.uuid))}"
        return Description(name, which, found.total_bytes, found.multiprocessors, found.copy_engines)

    def stream_new(self) -> int:
        """A stream that does not wait for the default one."""
        stream = C.c_uint64()
        self._call("stream_new", C.byref(stream))
        return stream.value

    def stream_done(self, stream: int) -> bool:
        """Whether all its work has ended. Never waits."""
        done = C.c_int32()
        self._call("stream_query", stream, C.byref(done))
        return bool(done.value)

    def stream_wait(self, stream: int) -> None:
        """Until all its work has ended."""
        self._call("stream_wait", stream)

    def stream_free(self, stream: int) -> None:
        """Its work ends as it would have."""
        self._call("stream_free", stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Between any two addresses, in the stream's order."""
        self._call("copy", target, source, nbytes, stream)

    def copy_batch(
        self, targets: NDArray[np.uint64], sources: NDArray[np.uint64], sizes: NDArray[np.uint64], stream: int
    ) -> str:
        """Copies fragments that do not meet each other, in any order among themselves.

        Args:
            targets, sources: [n] addresses.
            sizes: [n] bytes.
            stream: not 0, on which there are no batches.

        Returns:
            How: one "batch", or a "loop" of copies where this runtime or driver knows no batch; "nothing" for none.
        """
        arrays = [np.ascontiguousarray(array, np.uint64) for array in (targets, sources, sizes)]
        if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
            raise ValueError(f"shapes {[array.shape for array in arrays]} must be the same [n]")
        how = C.c_int32()
        self._call("copy_batch", *(array.ctypes.data for array in arrays), len(arrays[0]), stream, C.byref(how))
        return HOW[how.value]

    def register(self, address: int, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Pins memory that exists, in pieces; all of it or none."""
        offset = C.c_uint64()
        error = self._dll.kvx_cuda_host_register(address, nbytes, piece_bytes, C.byref(offset))
        self._check(error, f"pinning {nbytes} bytes at {address:#x}, at offset {offset.value}")

    def unregister(self, address: int, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Unpins what was registered with the same numbers."""
        self._call("host_unregister", address, nbytes, piece_bytes)

    def host_alloc(self, nbytes: int) -> int:
        """The address of new pinned memory."""
        address = C.c_uint64()
        self._call("host_alloc", nbytes, C.byref(address))
        return address.value

    def host_free(self, address: int) -> None:
        """Gives it back."""
        self._call("host_free", address)

    def where(self, address: int) -> Where:
        """What kind of memory is at an address."""
        found = PointerStruct()
        self._call("where", address, C.byref(found))
        return Where(MEMORY[found.memory], found.device, found.device_address)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._dll, f"kvx_cuda_{name}")(*arguments), name)

    def _check(self, error: int, what: str) -> None:
        if error:
            name = self._dll.kvx_cuda_error_name(error).decode(errors="replace")
            text = self._dll.kvx_cuda_error_text(error).decode(errors="replace")
            kind = DeviceMemoryError if -error == _OUT_OF_MEMORY else DeviceError
            raise kind(f"{what}: {name} ({-error}): {text}")


class Registration:
    """Host memory pinned for as long as this is held; or not pinned, and `why`.

    A refusal is no error: copies are slower from memory that is not pinned, and no kernel reaches it.
    """

    def __init__(self, cuda: CudaRuntime, address: int, nbytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._numbers = (address, nbytes, piece_bytes)
        self._cuda: CudaRuntime | None = cuda
        self.why = ""
        try:
            cuda.register(*self._numbers)
        except DeviceError as exc:
            self._cuda, self.why = None, str(exc)

    @property
    def pinned(self) -> bool:
        """Whether it is."""
        return self._cuda is not None

    def release(self) -> None:
        """Unpins; not while a device uses the memory. Twice is fine.

        Raises:
            DeviceError: a piece could not be unpinned; the others are.
        """
        cuda, self._cuda = self._cuda, None
        if cuda is not None:
            self.why = "released"
            cuda.unregister(*self._numbers)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"
