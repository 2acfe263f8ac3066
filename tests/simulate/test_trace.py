"""Traces: what is read of a good one, and that a bad line is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.simulate import Request, read_trace, survey
from kvxfer.simulate.trace import LINE_BYTES
from tests.simulate.oracle import Prompt, whole_tokens
from tests.simulate.prompts import BLOCK_TOKENS, line, traces, write

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "conversation-500.jsonl"
GOOD = {"timestamp": 5, "input_length": 513, "output_length": 0, "hash_ids": [7, 8]}


def but(**change: object) -> bytes:
    return json.dumps({name: value for name, value in (GOOD | change).items() if value is not None}).encode()


@settings(max_examples=30)
@given(traces())
def test_what_was_written_is_read(tmp_path_factory: pytest.TempPathFactory, prompts: list[Prompt]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "read.jsonl", prompts)
    assert list(read_trace(path, BLOCK_TOKENS)) == [Request(*prompt) for prompt in prompts]


@settings(max_examples=60)
@given(traces(), st.sampled_from([0, 1 << 20, (1 << 62) + 1]))
def test_a_survey_counts(tmp_path_factory: pytest.TempPathFactory, prompts: list[Prompt], far: int) -> None:
    named = [(ms, tokens, [block % 4 * far + block for block in blocks]) for ms, tokens, blocks in prompts]
    found = survey(write(tmp_path_factory.getbasetemp() / "survey.jsonl", named), BLOCK_TOKENS)
    blocks = [block for _, _, blocks in prompts for block in blocks]
    assert (found.requests, found.blocks, found.distinct_blocks) == (len(prompts), len(blocks), len(set(blocks)))
    assert found.prompt_tokens == sum(tokens for _, tokens, _ in prompts)
    assert found.seconds == (prompts[-1][0] - prompts[0][0]) / 1000
    seen: set[int] = set()
    runs = []
    for _, tokens, blocks in prompts:
        runs.append((sum(block in seen for block in blocks), tokens))
        seen.update(blocks)
    assert found.hit_blocks == sum(run for run, _ in runs)
    assert found.hit_tokens == sum(whole_tokens(run, tokens, BLOCK_TOKENS) for run, tokens in runs)


def test_the_sample() -> None:
    found = survey(SAMPLE)
    assert (found.requests, found.blocks, found.distinct_blocks) == (500, 14_162, 11_879)
    assert [request.ms for request in read_trace(SAMPLE)] == [
        json.loads(row)["timestamp"] for row in SAMPLE.read_text().splitlines()
    ]


def test_ids_of_any_size_follow_one_another(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [(0, 12, [(1 << 64) - 1, 5, 1 << 63])] * 2)
    found = survey(path, BLOCK_TOKENS)
    assert (found.distinct_blocks, found.hit_blocks, found.hit_tokens) == (3, 3, 8)


BAD = {
    b"\xff{}": "not UTF-8: invalid start byte at byte 0",
    b"{": "not JSON: .* at column",
    b"": "not JSON: Expecting value at column 1",
    b"[" * 100_000: "nested too deeply|not JSON",
    b'{"a":' * 100_000: "nested too deeply|not JSON",
    b"[]": "a list of 0 is no JSON object",
    b"NaN": "nan is no JSON object",
    b'{"timestamp": 0}': "no input_length and no output_length and no hash_ids",
    but(timestamp=None): "no timestamp",
    but(timestamp="0"): "timestamp='0' must be a number",
    but(timestamp=True): "timestamp=True must be",
    but(timestamp=-1): "timestamp=-1 must be",
    but(timestamp=float("nan")): "timestamp=nan must be",
    but(timestamp=1 << 54): "timestamp=18014398509481984 must be",
    but(input_length=0): "input_length=0 must be an integer of at least 1",
    but(input_length=513.0): "input_length=513.0 must be",
    but(output_length=-1): "output_length=-1 must be an integer of at least 0",
    but(hash_ids={}): "hash_ids=a dict of 0 must be a list of integers",
    but(hash_ids=[1, "2"]): "hash_ids=a list of 2 must be",
    but(hash_ids=[1, True]): "hash_ids=a list of 2 must be",
    but(hash_ids=[1, 2.0]): "hash_ids=a list of 2 must be",
    but(hash_ids=[[[]], {}]): "hash_ids=a list of 2 must be",
    but(hash_ids=[1]): "1 hash_ids for input_length=513: one for each 512",
    but(hash_ids=[1, 2, 3]): "3 hash_ids for input_length=513",
    but(input_length=512): "2 hash_ids for input_length=512",
    but(input_length=10**4000): "2 hash_ids for input_length=a number of more than 128 bits",
    but(hash_ids=[-1, 2]): r"hash_ids from -1 to 2 must be in 0\.\.2",
    but(hash_ids=[1, 1 << 64]): "hash_ids from 1 to 18446744073709551616 must be",
    but(hash_ids=[1, 10**4000]): "hash_ids from 1 to a number of more than 128 bits",
    but(hash_ids=[3, 3]): "hash_ids has a number twice",
    b'{"timestamp": ' + b"9" * 5000 + b"}": "a number with too many digits",
    but(timestamp=4): "timestamp=4 is before the last one, 5",
    but(hash_ids=[8, 9]): "hash id 8 is the first block, and was after 7 in an earlier line",
    but(hash_ids=[6, 8]): "hash id 8 is after 6, and was after 7",
    but(hash_ids=[9, 7]): "hash id 7 is after 9, and was the first block",
    but(x="a" * LINE_BYTES): f"longer than {LINE_BYTES} bytes",
}


@pytest.mark.parametrize(("row", "message"), BAD.items(), ids=range(len(BAD)))
def test_a_bad_line_is_named(tmp_path: Path, row: bytes, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(but() + b"\n" + but() + b"\n" + row + b"\n" + but() + b"\n")
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 3: ({message})") as caught:
        survey(path)
    assert len(str(caught.value)) < 400


def test_the_last_line_needs_no_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(but() + b"\n" + but(timestamp=1e4))
    assert [request.ms for request in read_trace(path)] == [5, 1e4]


def test_what_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="empty has no request"):
        survey(tmp_path / "empty")
    for name in ("", "pipe"):
        with pytest.raises(ConfigError, match="is no regular file"):
            survey(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        survey(tmp_path / "nothing")


def test_one_line_at_a_time_is_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [(0, 4, [0])] * 8_000)
    survey(path, BLOCK_TOKENS)  # what is made once
    tracemalloc.start()
    try:
        survey(path, BLOCK_TOKENS)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size // 3
    finally:
        tracemalloc.stop()


def test_dense_ids_take_eight_bytes_each() -> None:
    from kvxfer.simulate.trace import _Parents

    parents = _Parents()
    for block in range(300_000):
        assert parents.follow(block, block - 1 if block else None) == (False, None)
    assert not parents._far
    assert len(parents._near) * parents._near.itemsize < 3 << 20
    assert parents.follow(299_999, 0) == (True, 299_998)


def test_nothing_heavy_is_loaded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, kvxfer.simulate; print(*sys.modules)"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    heavy = {"torch", "lmdb", "numpy", "kvxfer._native", "kvxfer.store", "typer", "rich"}
    assert not heavy & set(done.stdout.split())


def test_a_line_is_what_is_published() -> None:
    assert line((0, 4, [0])) == '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [0]}'
