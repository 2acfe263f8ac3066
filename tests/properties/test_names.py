"""Names: what differs anywhere has another one, and what is equal the same."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.geometry import KVGeometry, ShardSpec
from kvxfer.keys import Namespace, kvx1_namespace, make_offload_key
from kvxfer.opaque import opaque_namespace
from tests.examples import examples

few = settings(max_examples=examples(60))
# Few values, so that two draws are often equal or equal but for one field; and texts that others begin with.
WORDS = st.sampled_from(["a", "b", "ab", "a\0b", "1", "None", "\u00e9", "e\u0301"])
NUMBERS = st.integers(1, 3)
SCALARS = st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, -0.0, "", "0", "1", "a", "null"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2), max_leaves=4
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": WORDS,
    "weights_fingerprint": WORDS,
    "dtype": WORDS,
    "canonical_form": WORDS,
    "form_version": NUMBERS,
    "geometry": st.lists(st.dictionaries(WORDS, SCALARS, max_size=2), min_size=1, max_size=2),
    "blocks_per_chunk": NUMBERS,
    "tokens_per_chunk": NUMBERS,
    "layer_groups": NUMBERS,
    "topology": st.none() | WORDS,
    "extra": st.dictionaries(WORDS, VALUES, max_size=2),
}


def strict(fields: dict[str, Any]) -> str:
    """Text that tells 1, 1.0, True, -0.0 and "1" apart, and not the order of an object."""
    return json.dumps(fields, sort_keys=True)


@few
@given(st.fixed_dictionaries(FIELDS), st.data())
def test_two_namespaces_have_one_digest_exactly_if_all_their_fields_are_equal(
    one: dict[str, Any], data: st.DataObject
) -> None:
    changed = data.draw(st.sets(st.sampled_from(sorted(FIELDS)), max_size=3))
    two = one | {name: data.draw(FIELDS[name], label=name) for name in changed}
    epochs = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    equal = strict(one) == strict(two) and epochs[0] == epochs[1]
    assert (Namespace(**one).digest(epochs[0]) == Namespace(**two).digest(epochs[1])) == equal


@few
@given(st.fixed_dictionaries(FIELDS))
def test_what_is_written_down_names_the_same_bytes(fields: dict[str, Any]) -> None:
    namespace = Namespace(**fields)
    again = Namespace.from_json(json.loads(json.dumps(namespace.as_json())))
    assert again.digest(0) == namespace.digest(0)


@few
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
@example("")
def test_a_salt_is_no_adapter(text: str) -> None:
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=4, dtype="float16", tokens_per_block=4)

    def digest(**extra: Any) -> bytes:
        return kvx1_namespace(geometry, model="m", weights_fingerprint="w", extra=extra).digest(0)

    names = [digest(), digest(salt=text), digest(adapter=text), digest(salt=text, adapter=text), digest(extra=text)]
    assert len(set(names)) == len(names)


@few
@given(st.data())
def test_another_sharding_is_another_name_only_for_bytes_that_depend_on_it(data: st.DataObject) -> None:
    geometry = KVGeometry.opaque((64,), tokens_per_block=16)
    shards = [
        ShardSpec(
            tp_size=data.draw(NUMBERS),
            pp_size=data.draw(NUMBERS),
            pcp_size=data.draw(NUMBERS),
            interleave=data.draw(NUMBERS),
        )
        for _ in range(2)
    ]
    names = [opaque_namespace(geometry, shard, model="m", weights_fingerprint="w").digest(0) for shard in shards]
    assert (names[0] == names[1]) == (shards[0] == shards[1])


@few
@given(
    st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 300)),
    st.tuples(st.binary(min_size=1, max_size=8), st.integers(0, 300)),
)
@example((b"a\0\0\0\0", 0), (b"a", 0))
def test_a_key_is_one_hash_and_one_group(one: tuple[bytes, int], two: tuple[bytes, int]) -> None:
    assert (make_offload_key(*one) == make_offload_key(*two)) == (one == two)
