"""Keys and namespaces: what differs has another name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError, KvxferError
from kvxfer.keys import Namespace, check_key, make_offload_key, weights_fingerprint

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


def namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "model": "org/model", "weights_fingerprint": "f00d", "dtype": "bfloat16", "canonical_form": "kvx1",
        "geometry": [{"num_layers": 2, "kind": "attention"}], "blocks_per_chunk": 4, "tokens_per_chunk": 64,
    }  # fmt: skip
    return Namespace(**(fields | changes))


def strict(value: Any) -> str:
    """JSON that tells 1, 1.0 and True apart, and not the order of an object."""
    return json.dumps(value, sort_keys=True)


@given(st.dictionaries(TEXT, VALUES, max_size=4), st.dictionaries(TEXT, VALUES, max_size=4))
def test_namespaces_are_equal_exactly_if_their_digests_are(one: dict[str, Any], two: dict[str, Any]) -> None:
    first, second = namespace(extra=one), namespace(extra=two)
    assert (first.digest(0) == second.digest(0)) == (strict(one) == strict(two))


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_json_and_back_is_the_same_namespace(extra: dict[str, Any]) -> None:
    first = namespace(extra=extra)
    again = Namespace.from_json(json.loads(json.dumps(first.as_json())))
    assert again.digest(3) == first.digest(3)
    assert again == first


@given(TEXT)
def test_a_salt_equal_to_an_adapters_name_is_another_namespace(text: str) -> None:
    digests = {namespace(extra={name: text}).digest(0) for name in ("salt", "adapter", "tenant")}
    assert len(digests) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "org/model2"}, {"weights_fingerprint": "f00e"}, {"dtype": "float16"}, {"canonical_form": "row"},
        {"form_version": 2}, {"geometry": [{"num_layers": 2, "kind": "mla"}]}, {"geometry": [{"num_layers": 3}]},
        {"geometry": [{"num_layers": 2, "kind": "attention"}] * 2}, {"blocks_per_chunk": 1}, {"tokens_per_chunk": 32},
        {"layer_groups": 2}, {"topology": "tp2"}, {"extra": {"salt": ""}}, {"extra": {"salt": None}},
    ],
)  # fmt: skip
def test_every_field_changes_the_digest(changes: dict[str, Any]) -> None:
    assert namespace(**changes).digest(0) != namespace().digest(0)


def test_the_weight_epoch_changes_the_digest_and_time_does_not() -> None:
    assert len({namespace().digest(epoch) for epoch in range(5)}) == 5
    assert namespace().digest(1) == namespace().digest(1)
    assert len(namespace().digest(0)) == 32


def test_moving_a_character_between_fields_changes_the_digest() -> None:
    assert namespace(model="ab", dtype="c").digest(0) != namespace(model="a", dtype="bc").digest(0)
    assert namespace(extra={"ab": "c"}).digest(0) != namespace(extra={"a": "bc"}).digest(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_fingerprint": ""}, "weights_fingerprint='' must be text and not empty"),
        ({"model": None}, "model=None"),
        ({"topology": ""}, "topology=''"),
        ({"blocks_per_chunk": 0}, "blocks_per_chunk=0 must be an integer of at least 1"),
        ({"form_version": True}, "form_version=True"),
        ({"geometry": []}, "names no KV-cache group"),
        ({"geometry": np.array([])}, "geometry must be a sequence"),
        ({"geometry": {"num_layers": 2}}, "must be a sequence of mappings"),
        ({"geometry": [{"x": b"raw"}]}, r"geometry\[0\].x=b'raw' must be made of"),
        ({"geometry": [{"x": float("nan")}]}, r"geometry\[0\].x=nan"),
        ({"geometry": [{1: 2}]}, r"geometry\[0\] has keys that are not text"),
        ({"extra": ["salt"]}, "extra="),
        ({"model": "\ud800"}, "not valid text"),
    ],
)
def test_fields_that_cannot_be_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        namespace(**changes)


@pytest.mark.parametrize("depth", [40, 5000])
def test_values_within_values_end_somewhere(depth: int) -> None:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    itself: dict[str, Any] = {}
    itself["a"] = itself
    for extra in ({"x": value}, itself):
        with pytest.raises(ConfigError, match="field extra.* is nested more than 32 deep"):
            namespace(extra=extra)


def test_fields_are_copied() -> None:
    group = {"num_layers": 2}
    space = namespace(geometry=[group])
    before = space.digest(0)
    group["num_layers"] = 3
    assert space.digest(0) == before


def test_from_json_wants_exactly_the_fields() -> None:
    raw = namespace().as_json()
    with pytest.raises(ConfigError, match="they must be"):
        Namespace.from_json(raw | {"more": 1})
    del raw["model"]
    with pytest.raises(ConfigError, match="they must be"):
        Namespace.from_json(raw)


def test_a_key_is_the_hash_and_the_group() -> None:
    assert make_offload_key(b"\x01" * 32, 258) == b"\x01" * 32 + b"\0\0\1\2"
    assert check_key(b"x") == b"x"


@pytest.mark.parametrize(
    "call",
    [
        lambda: make_offload_key(b"", 0), lambda: make_offload_key(b"x" * 61, 0), lambda: make_offload_key(b"x", -1),
        lambda: make_offload_key(b"x", 1 << 32), lambda: check_key(b""), lambda: check_key(b"x" * 65),
        lambda: make_offload_key(5, 0), lambda: make_offload_key("x", 0), lambda: make_offload_key(b"x", 0.0),
        lambda: make_offload_key(b"x", True),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_are_refused(call: Any) -> None:
    with pytest.raises(KvxferError):
        call()


def write_weights(path: Path, header: bytes = b'{"w":{}}', body: int = 64) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(body))
    os.utime(path, ns=(10**18, 10**18))
    return path


def test_weights_are_named_by_headers_sizes_and_times(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "model-1.safetensors")
    (tmp_path / "config.json").write_text("{}")
    first = weights_fingerprint(tmp_path)
    assert weights_fingerprint(str(tmp_path)) == first
    (tmp_path / "config.json").write_text("{ }")
    assert weights_fingerprint(tmp_path) == first
    seen = {first}
    write_weights(file, header=b'{"v":{}}')
    seen.add(weights_fingerprint(tmp_path))
    write_weights(file, body=65)
    seen.add(weights_fingerprint(tmp_path))
    write_weights(file)
    assert weights_fingerprint(tmp_path) == first
    os.utime(file, ns=(10**18, 10**18 + 1))
    seen.add(weights_fingerprint(tmp_path))
    write_weights(tmp_path / "model-2.safetensors")
    seen.add(weights_fingerprint(tmp_path))
    assert len(seen) == 5
    assert weights_fingerprint(file) != first


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"\x02\0\0", (1 << 62).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"{abc",
    ],
)  # fmt: skip
def test_files_without_a_header_are_refused_before_they_are_read(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match="no safetensors file"):
        weights_fingerprint(file)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file: give weights_fingerprint yourself"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        weights_fingerprint(tmp_path / "missing.safetensors")
