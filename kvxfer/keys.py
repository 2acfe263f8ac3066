"""Names of stored bytes: keys, and the namespace that says what the bytes under a key mean."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NewType, Self

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.geometry import KVGeometry
from kvxfer.slot import MAX_KEY_BYTES

OffloadKey = NewType("OffloadKey", bytes)

GROUP_BYTES = 4  # at the end of a key: its KV-cache group; keys of one chain are of one group
_MAX_HEADER = 100 << 20  # the largest header that safetensors itself reads
_DOMAIN = b"kvxfer namespace 1\0"
_MAX_DEPTH = 32  # of values within values


def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey:
    """A key as vLLM packs it: the block's hash, then the KV-cache group in four big-endian bytes.

    Raises:
        KvxferError: the key would not have 1..64 bytes, or the group is not an unsigned 32-bit number.
    """
    if not isinstance(block_hash, bytes | bytearray | memoryview):  # bytes(5) would be five zeros
        raise KvxferError(f"block_hash={block_hash!r} must be bytes")
    if type(group_idx) is not int or not 0 <= group_idx < 1 << (8 * GROUP_BYTES):
        raise KvxferError(f"group_idx={group_idx!r} must be an integer in 0..{(1 << (8 * GROUP_BYTES)) - 1}")
    if not block_hash:
        raise KvxferError("block_hash is empty")
    return check_key(bytes(block_hash) + group_idx.to_bytes(GROUP_BYTES, "big"))


def check_key(key: bytes) -> OffloadKey:
    """`key`, if it can be one.

    Raises:
        KvxferError: it has not 1..64 bytes.
    """
    if not isinstance(key, bytes) or not 1 <= len(key) <= MAX_KEY_BYTES:
        raise KvxferError(f"key {key!r} must be 1..{MAX_KEY_BYTES} bytes")
    return OffloadKey(key)


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy of a JSON-able value.

    Raises:
        ConfigError: it holds something that JSON cannot give back as it was, or itself.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(f"namespace field {where.partition('.')[0]} is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"namespace field {where}={value!r} is not valid text") from None
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ConfigError(f"namespace field {where} has keys that are not text: {sorted(map(repr, value))}")
        return {_plain(key, where): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ConfigError(f"namespace field {where}={value!r} must be made of None, bool, int, float, str, list and dict")


def _tagged(value: Any) -> bytes:
    """An encoding of a plain value that no other value shares: every part carries its type and its length."""
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"T" if value else b"F"
    if isinstance(value, int):
        return _sized(b"I", b"%d" % value)
    if isinstance(value, float):
        return b"D" + struct.pack("<d", value)
    if isinstance(value, str):
        return _sized(b"S", value.encode())
    if isinstance(value, list):
        return _counted(b"L", [_tagged(item) for item in value])
    return _counted(b"M", sorted(_tagged(key) + _tagged(item) for key, item in value.items()))


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def _counted(tag: bytes, parts: list[bytes]) -> bytes:
    return tag + struct.pack("<Q", len(parts)) + b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that changes the meaning of stored bytes. Two caches share bytes only if every field is equal.

    Fields that may be mappings or sequences are copied and must be JSON-able.

    Raises:
        ConfigError: a field is empty, out of bounds or not JSON-able.
    """

    model: str
    weights_fingerprint: str  # which weights: weights_fingerprint(path), a revision, a digest
    dtype: str  # of the cache as the kernels see it
    canonical_form: str  # kvx1 | row | ...
    form_version: int = 1
    geometry: Sequence[Mapping[str, Any]]  # the fields of each KV-cache group
    blocks_per_chunk: int
    tokens_per_chunk: int
    layer_groups: int = 1  # how many equal parts the layers are cut into; divides every pipeline stage
    topology: str | None = None  # None only where the form is certified not to depend on it
    extra: Mapping[str, Any] = field(default_factory=dict)  # salt, tenant, adapter, ...: each under its own name

    def __post_init__(self) -> None:
        for name in ("model", "weights_fingerprint", "dtype", "canonical_form"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"namespace field {name}={value!r} must be text and not empty")
        if self.topology is not None and (not isinstance(self.topology, str) or not self.topology):
            raise ConfigError(f"namespace field topology={self.topology!r} must be None, or text and not empty")
        for name in ("form_version", "blocks_per_chunk", "tokens_per_chunk", "layer_groups"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"namespace field {name}={value!r} must be an integer of at least 1")
        groups = self.geometry
        if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
            raise ConfigError("namespace field geometry must be a sequence of mappings, one for each KV-cache group")
        if not self.geometry:
            raise ConfigError("namespace field geometry names no KV-cache group")
        if not isinstance(self.extra, Mapping):
            raise ConfigError(f"namespace field extra={self.extra!r} must be a mapping")
        for item in fields(self):
            object.__setattr__(self, item.name, _plain(getattr(self, item.name), item.name))

    def digest(self, weight_epoch: int) -> bytes:
        """32 bytes that stand for these fields and the root's weight epoch."""
        return hashlib.sha256(_DOMAIN + _tagged({"weight_epoch": weight_epoch, "fields": self.as_json()})).digest()

    def as_json(self) -> dict[str, Any]:
        """The fields, for namespace.json; `from_json` gives an equal namespace back."""
        return {item.name: _plain(getattr(self, item.name), item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """The namespace that `as_json` described.

        Raises:
            ConfigError: fields are missing, unknown or cannot be.
        """
        known = {item.name for item in fields(cls)}
        if raw.keys() != known:
            raise ConfigError(f"namespace has fields {sorted(raw)}; they must be {sorted(known)}")
        return cls(**raw)


def kvx1_namespace(
    geometry: KVGeometry,
    *,
    model: str,
    weights_fingerprint: str,
    blocks_per_chunk: int = 1,
    layer_groups: int = 1,
    extra: Mapping[str, Any] | None = None,
) -> Namespace:
    """The namespace of one KV-cache group in the `kvx1` form, which no sharding and no page layout shows in.

    Args:
        weights_fingerprint: which weights: `weights_fingerprint(path)`, a revision, a digest.
        blocks_per_chunk, layer_groups: as given to `kvx1_mapping`.
        extra: salt, tenant, adapter, ...: each under its own name.

    Raises:
        ConfigError: a field is empty, out of bounds or not JSON-able.
    """
    return Namespace(
        model=model,
        weights_fingerprint=weights_fingerprint,
        dtype=geometry.dtype,
        canonical_form="kvx1",
        geometry=[asdict(geometry)],
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_chunk=blocks_per_chunk * geometry.tokens_per_block,
        layer_groups=layer_groups,
        extra=extra or {},
    )


def weights_fingerprint(path: str | os.PathLike[str]) -> str:
    """Names the weights in a local directory (or one file) by their safetensors headers, sizes and times of change.

    The tensors themselves are not read. Copying files to another place with other times gives another name, and so a
    cold cache; give `Namespace.weights_fingerprint` yourself (a revision) where caches are to be shared.

    Raises:
        ConfigError: there is no safetensors file, or one cannot be read or has no header.
    """
    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise ConfigError(f"{place} has no *.safetensors file: give weights_fingerprint yourself, such as a revision")
    digest = hashlib.sha256(b"kvxfer weights 1\0")
    for file in files:
        try:
            with file.open("rb") as stream:
                status = os.fstat(stream.fileno())
                header = _safetensors_header(file, status.st_size, stream.read(8), stream)
        except OSError as exc:
            raise ConfigError(f"cannot read the weights' header: {exc}") from exc
        digest.update(_tagged([file.name, status.st_size, status.st_mtime_ns, hashlib.sha256(header).hexdigest()]))
    return digest.hexdigest()


def _safetensors_header(file: Path, size: int, prefix: bytes, stream: Any) -> bytes:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise ConfigError(f"{file} is no safetensors file: its header claims {length} of {size} bytes")
    header: bytes = stream.read(length)
    try:
        if len(header) != length or not isinstance(json.loads(header), dict):
            raise ValueError("not a JSON object")
    except ValueError as exc:
        raise ConfigError(f"{file} is no safetensors file: its header is damaged ({exc})") from exc
    return header
