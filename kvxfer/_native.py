"""ctypes face of libkvx: the declarations of csrc/kvx.h and nothing else.

The library is loaded at the first call of `lib()`, so that importing kvxfer needs no build.
"""

from __future__ import annotations

import ctypes as C
import os
from functools import cache
from pathlib import Path
from typing import Any

from kvxfer.errors import NativeError
from kvxfer.slot import SlotLayout

ABI_VERSION = 5
UINT64_MAX = 2**64 - 1

OPS = (
    "open", "close", "pread", "pwrite", "fallocate", "ftruncate", "fsync",
    "fstat", "unlink", "rename", "mkdir", "lock", "mmap",
    "uring_setup", "uring_register", "uring_submit", "uring_complete",
)  # fmt: skip
FAULT_ACTIONS = {
    "errno": 1, "short": 2, "delay": 3, "hang": 4, "kill_before": 5, "kill_after": 6, "flip": 7,
}  # fmt: skip
LOCK_TRY, LOCK_DROP, LOCK_TEST = 1, 2, 3  # kvx_lock_operation
STORE, LOAD = 0, 1
BACKENDS = {"posix": 0, "uring": 1}
MAX_DEPTH = 8
WHY_BYTES = 256


class Fault(C.Structure):
    """kvx_fault."""

    _fields_ = [
        ("op", C.c_int32), ("action", C.c_int32), ("arg", C.c_uint64), ("after", C.c_uint64),
        ("times", C.c_uint64), ("offset_lo", C.c_uint64), ("offset_hi", C.c_uint64),
    ]  # fmt: skip


class SlotLayoutStruct(C.Structure):
    """kvx_slot_layout."""

    _fields_ = [
        ("segment_bytes", C.c_uint64), ("last_segment_bytes", C.c_uint64), ("segment_stride", C.c_uint64),
        ("num_segments", C.c_uint32), ("segments_per_trailer", C.c_uint32), ("alignment", C.c_uint32),
        ("blocks_per_chunk", C.c_uint32),
    ]  # fmt: skip

    @classmethod
    def of(cls, layout: SlotLayout) -> SlotLayoutStruct:
        """The C twin of a SlotLayout."""
        return cls(
            layout.segment_bytes, layout.last_segment_bytes, layout.segment_stride, layout.num_segments,
            layout.segments_per_trailer, layout.alignment, layout.blocks_per_chunk,
        )  # fmt: skip


class Trailer(C.Structure):
    """kvx_trailer."""

    _fields_ = [
        ("namespace_digest", C.c_uint8 * 32), ("key", C.c_uint8 * 64), ("key_bytes", C.c_uint32),
        ("first_segment", C.c_uint32), ("segment_count", C.c_uint32), ("num_segments", C.c_uint32),
        ("blocks_per_chunk", C.c_uint32), ("reserved", C.c_uint32), ("generation", C.c_uint64),
        ("payload_bytes", C.c_uint64), ("segment_bytes", C.c_uint64), ("mask", C.c_uint64 * 4),
    ]  # fmt: skip


class Tensor(C.Structure):
    """kvx_tensor."""

    _fields_ = [("base", C.c_uint64), ("block_stride", C.c_uint64), ("num_blocks", C.c_uint64)]


class Run(C.Structure):
    """kvx_run; layout.RUN_DTYPE is its numpy twin."""

    _fields_ = [
        ("tensor", C.c_uint32), ("segment", C.c_uint32), ("local_offset", C.c_uint64),
        ("canonical_offset", C.c_uint64), ("fragment_size", C.c_uint64), ("num_fragments", C.c_uint64),
        ("local_stride", C.c_uint64),
    ]  # fmt: skip


class EngineConfigStruct(C.Structure):
    """kvx_engine_config."""

    _fields_ = [
        ("threads", C.c_uint32), ("max_lost_threads", C.c_uint32), ("io_timeout_ns", C.c_uint64),
        ("read_piece_bytes", C.c_uint64), ("backend", C.c_uint32), ("straight", C.c_uint32),
        ("write_piece_bytes", C.c_uint64), ("depth", C.c_uint32), ("reserved", C.c_uint32),
    ]  # fmt: skip


class Chunk(C.Structure):
    """kvx_chunk."""

    _fields_ = [
        ("file", C.c_void_p), ("slot_offset", C.c_uint64), ("generation", C.c_uint64),
        ("key_bytes", C.c_uint32), ("reserved", C.c_uint32), ("key", C.c_uint8 * 64),
    ]  # fmt: skip


class Job(C.Structure):
    """kvx_job."""

    _fields_ = [
        ("job_id", C.c_uint64), ("direction", C.c_int32), ("num_chunks", C.c_uint32), ("num_parts", C.c_uint32),
        ("reserved", C.c_uint32), ("parts", C.c_void_p), ("part_writes", C.c_void_p), ("chunks", C.c_void_p),
        ("block_ids", C.c_void_p), ("namespace_digest", C.c_void_p), ("deadline_ns", C.c_uint64),
    ]  # fmt: skip


class Result(C.Structure):
    """kvx_result."""

    _fields_ = [
        ("job_id", C.c_uint64), ("direction", C.c_int32), ("num_chunks", C.c_uint32), ("num_ok", C.c_uint32),
        ("reserved", C.c_uint32), ("nbytes", C.c_uint64), ("elapsed_ns", C.c_uint64),
    ]  # fmt: skip


class ChunkErrorStruct(C.Structure):
    """kvx_chunk_error."""

    _fields_ = [
        ("status", C.c_int32), ("error", C.c_int32), ("segment", C.c_uint32), ("reserved", C.c_uint32),
        ("offset", C.c_uint64), ("wanted", C.c_uint64), ("moved", C.c_uint64),
    ]  # fmt: skip


class Stats(C.Structure):
    """kvx_stats."""

    _fields_ = [
        (name, C.c_uint64)
        for name in (
            "chunks_stored", "chunks_loaded", "bytes_written", "bytes_read", "chunks_verified",
            "segments_verified", "truncated", "bad_trailer", "foreign", "bad_sum", "absent", "io_errors",
            "deadline_cuts", "lost_calls", "late_returns", "lost_writes", "read_ns", "write_ns",
            "staging_peak_bytes", "queued_chunks", "busy_threads", "threads", "lost_threads", "leaked_bytes",
            "staging_bytes", "rings", "registered_bytes",
        )
    ]  # fmt: skip


STRUCTS = {
    "kvx_fault": Fault, "kvx_slot_layout": SlotLayoutStruct, "kvx_trailer": Trailer, "kvx_tensor": Tensor,
    "kvx_run": Run, "kvx_engine_config": EngineConfigStruct, "kvx_chunk": Chunk, "kvx_job": Job,
    "kvx_result": Result, "kvx_chunk_error": ChunkErrorStruct, "kvx_stats": Stats,
}  # fmt: skip

_P, _U64, _U32, _I64, _INT, _STR = C.c_void_p, C.c_uint64, C.c_uint32, C.c_int64, C.c_int, C.c_char_p

# name: (result, arguments)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvx_abi_version": (_U32, ()),
    "kvx_features": (_STR, ()),
    "kvx_struct_size": (C.c_size_t, (_STR,)),
    "kvx_checksum": (_U64, (_P, _U64, _U64)),
    "kvx_crc32c": (_U32, (_P, _U64)),
    "kvx_fault_add": (_INT, (_P,)),
    "kvx_fault_hits": (_U64, (_INT,)),
    "kvx_fault_release": (None, ()),
    "kvx_fault_clear": (None, ()),
    "kvx_op_calls": (_U64, (_INT,)),
    "kvx_sys_open": (_INT, (_STR, _INT, _INT)),
    "kvx_sys_close": (_INT, (_INT,)),
    "kvx_sys_pread": (_I64, (_INT, _P, _U64, _U64)),
    "kvx_sys_pwrite": (_I64, (_INT, _P, _U64, _U64)),
    "kvx_sys_fallocate": (_INT, (_INT, _U64)),
    "kvx_sys_ftruncate": (_INT, (_INT, _U64)),
    "kvx_sys_fsync": (_INT, (_INT,)),
    "kvx_sys_fdatasync": (_INT, (_INT,)),
    "kvx_sys_size": (_I64, (_INT,)),
    "kvx_sys_unlink": (_INT, (_STR,)),
    "kvx_sys_rename": (_INT, (_STR, _STR)),
    "kvx_sys_mkdir": (_INT, (_STR, _INT)),
    "kvx_sys_lock": (_INT, (_INT, _U64, _INT)),
    "kvx_sys_dioalign": (_INT, (_INT, _P, _P)),
    "kvx_file_adopt": (_P, (_INT, _STR, _INT)),
    "kvx_file_release": (None, (_P,)),
    "kvx_file_fd": (_INT, (_P,)),
    "kvx_file_pread": (_I64, (_P, _P, _U64, _U64, _P)),
    "kvx_file_pwrite": (_I64, (_P, _P, _U64, _U64, _P)),
    "kvx_slot_payload_stride": (_U64, (_P,)),
    "kvx_slot_trailers": (_U32, (_P,)),
    "kvx_slot_bytes": (_U64, (_P,)),
    "kvx_trailer_seal": (_INT, (_P, _P, _P, _U64)),
    "kvx_trailer_parse": (_INT, (_P, _U64, _P, _P)),
    "kvx_mapping_new": (_INT, (_P, _P, _U64, _P, _U32, _U64, _P, _U32, _INT, _P)),
    "kvx_mapping_release": (None, (_P,)),
    "kvx_gather": (_INT, (_P, _P, _U64, _P, _U64, _P, _INT)),
    "kvx_scatter": (_INT, (_P, _P, _U64, _P, _U64, _P, _INT)),
    "kvx_uring_try": (_INT, (_P, _U64, _P)),
    "kvx_engine_new": (_INT, (_P, _P)),
    "kvx_engine_submit": (_INT, (_P, _P)),
    "kvx_engine_poll": (_INT, (_P, _INT, _P)),
    "kvx_engine_details": (_INT, (_P, _U64, _P, _P)),
    "kvx_engine_forget": (None, (_P, _U64)),
    "kvx_engine_late": (_INT, (_P, _P, _P)),
    "kvx_engine_wait": (_INT, (_P, _U32, _U64)),
    "kvx_engine_wake": (None, (_P, _U32)),
    "kvx_engine_wait_gathered": (_INT, (_P, _U64, _U64)),
    "kvx_engine_cancel": (_INT, (_P, _U64)),
    "kvx_engine_shutdown": (_INT, (_P, _U64)),
    "kvx_engine_free": (None, (_P,)),
    "kvx_engine_stats": (None, (_P, _P)),
}


_QUICK = ("kvx_engine_wake",)


def library_path() -> Path:
    """Where libkvx is: KVXFER_LIBRARY if set (sanitizer builds), else beside this file."""
    return Path(os.environ.get("KVXFER_LIBRARY") or Path(__file__).with_name("libkvx.so"))


@cache
def lib() -> Any:
    """The loaded library, with argument types set. ctypes releases the GIL around every call.

    Raises:
        NativeError: it is missing, cannot be loaded, or was built for another version of this file.
    """
    path = library_path()
    try:
        dll = C.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(dll, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as exc:
        raise NativeError(f"cannot load {path.name}: {exc}; reinstall kvxfer (in a checkout: make install)") from exc
    if (found := dll.kvx_abi_version()) != ABI_VERSION:
        raise NativeError(f"{path.name} has ABI version {found}, this kvxfer needs {ABI_VERSION}; reinstall kvxfer")
    return dll


@cache
def quick() -> Any:
    """The same library, for calls that are over at once: the GIL is kept, so that no other thread takes it meanwhile.

    Only for calls that wait for no system call and no thread that needs the GIL.
    """
    lib()  # says what is wrong
    dll = C.PyDLL(str(library_path()))
    for name in _QUICK:
        function = getattr(dll, name)
        function.restype, function.argtypes = _SIGNATURES[name]
    return dll


def address(buffer: Any) -> int:
    """Address of a numpy array (or anything with `ctypes.data` or `data_ptr()`)."""
    if hasattr(buffer, "data_ptr"):
        return int(buffer.data_ptr())
    return int(buffer.ctypes.data)


# ---- host rows (section 7 of kvx.h)


class RowRun(C.Structure):
    """kvx_row_run; convert.native_rows.ROW_RUN_DTYPE is its numpy twin."""

    _fields_ = [
        ("local_offset", C.c_uint64), ("canonical_offset", C.c_uint64), ("fragment_size", C.c_uint64),
        ("num_fragments", C.c_uint64), ("local_stride", C.c_uint64), ("canonical_stride", C.c_uint64),
    ]  # fmt: skip


class RowCellStruct(C.Structure):
    """kvx_row_cell."""

    _fields_ = [
        ("tensor_base", C.c_uint64), ("block_stride", C.c_uint64), ("num_blocks", C.c_uint64),
        ("local_bytes", C.c_uint64), ("cell_base", C.c_uint64), ("page_stride", C.c_uint64),
        ("first_run", C.c_uint32), ("num_runs", C.c_uint32), ("num_writers", C.c_uint32),
        ("writer_index", C.c_uint32),
    ]  # fmt: skip


STRUCTS |= {"kvx_row_run": RowRun, "kvx_row_cell": RowCellStruct}
_SIGNATURES |= {
    "kvx_row_plan_new": (_INT, (_P, _P, _U64, _P, _U32, _U64, _U64, _U32, _P)),
    "kvx_row_plan_free": (None, (_P,)),
    "kvx_row_gather": (_INT, (_P, _P, _P, _P, _INT, _P)),
    "kvx_row_scatter": (_INT, (_P, _P, _P, _P, _INT, _P)),
}
