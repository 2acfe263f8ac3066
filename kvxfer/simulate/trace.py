"""Request traces: one JSON object a line, as published with the Mooncake paper. Nothing in one is trusted.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

`timestamp` is in ms and never goes back, the lengths are tokens. `hash_ids` has a number for each block of the prompt,
the last of which may be partial; equal numbers mean equal prefixes up to and including that block.
"""

from __future__ import annotations

import json
import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer.errors import ConfigError

BLOCK_TOKENS = 512
LINE_BYTES = 16 << 20  # a prompt of 400 million tokens; a longer line is no request
MOST_MS = 1 << 53
MOST_ID = (1 << 64) - 1
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class Request(NamedTuple):
    """One prompt."""

    ms: float  # when it came
    tokens: int
    blocks: list[int]  # its ids, the first holding its first token


class _BadLine(Exception):
    """What is wrong with a line."""


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Iterator[Request]:
    """The requests of a file, one line in memory at a time.

    Args:
        block_tokens: tokens that an id stands for.

    Raises:
        ConfigError: no regular file, or a line that is no request: names the line and what is wrong.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe cannot be read twice, and opening one may never return
        raise ConfigError(f"{path} is no regular file")
    before = 0.0
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            try:
                request = _request(line, block_tokens)
                if request.ms < before:
                    raise _BadLine(f"timestamp={request.ms} is before the last one, {before}")
            except _BadLine as exc:
                raise ConfigError(f"{path}, line {number}: {exc}") from None
            before = request.ms
            yield request


def _request(line: bytes, block_tokens: int) -> Request:
    record = _object(line)
    if missing := [name for name in _FIELDS if name not in record]:
        raise _BadLine(f"no {' and no '.join(missing)}")
    ms, tokens, ids = record["timestamp"], record["input_length"], record["hash_ids"]
    if type(ms) not in (int, float) or not 0 <= ms <= MOST_MS:  # a NaN is not
        raise _BadLine(f"timestamp={_short(ms)} must be a number in 0..{MOST_MS}")
    for name, least in (("input_length", 1), ("output_length", 0)):
        if type(record[name]) is not int or record[name] < least:
            raise _BadLine(f"{name}={_short(record[name])} must be an integer of at least {least}")
    if type(ids) is not list or not set(map(type, ids)) <= {int}:
        raise _BadLine(f"hash_ids={_short(ids)} must be a list of integers")
    if len(ids) != -(-tokens // block_tokens):
        raise _BadLine(f"{len(ids)} hash_ids for input_length={_short(tokens)}: one for each {block_tokens} tokens")
    if min(ids) < 0 or max(ids) > MOST_ID:
        raise _BadLine(f"hash_ids from {_short(min(ids))} to {_short(max(ids))} must be in 0..2**64 - 1")
    if len(set(ids)) != len(ids):
        raise _BadLine("hash_ids has a number twice: a prompt has each of its prefixes once")
    return Request(ms, tokens, ids)


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > LINE_BYTES:
        raise _BadLine(f"longer than {LINE_BYTES} bytes")
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as exc:
        raise _BadLine(f"not UTF-8: {exc.reason} at byte {exc.start}") from None
    except json.JSONDecodeError as exc:
        raise _BadLine(f"not JSON: {exc.msg} at column {exc.colno}") from None
    except RecursionError:
        raise _BadLine("nested too deeply") from None
    except ValueError:  # what Python says of an integer of thousands of digits
        raise _BadLine("a number with too many digits") from None
    if type(record) is not dict:
        raise _BadLine(f"{_short(record)} is no JSON object")
    return record


def _short(value: object) -> str:
    """A value for a message, however long or deep it is."""
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and abs(value) >> 128:
        return "a number of more than 128 bits"
    return repr(value[:40] if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What a trace holds, and the most that any store could do for it: one that keeps everything from the start."""

    requests: int
    seconds: float  # from the first to the last
    prompt_tokens: int
    blocks: int
    distinct_blocks: int  # its footprint
    hit_tokens: int
    hit_blocks: int


def usable_tokens(run: int, tokens: int, block_tokens: int) -> int:
    """Tokens that need not be computed where the first `run` blocks are there: whole blocks, never the whole prompt."""
    reach = min(run * block_tokens, tokens - 1)
    return reach - reach % block_tokens


def survey(path: Path, block_tokens: int = BLOCK_TOKENS) -> Survey:
    """Reads a trace once, and checks that equal ids mean equal prefixes: that each follows the same one everywhere.

    Raises:
        ConfigError: as `read_trace`; an id that follows another one than before; no request.
        OSError: it cannot be read.
    """
    parents = _Parents()
    requests = prompt_tokens = blocks = hit_tokens = hit_blocks = 0
    first = last = 0.0
    for request in read_trace(path, block_tokens):
        first, last = request.ms if requests == 0 else first, request.ms
        requests += 1
        run, parent = 0, None
        for block in request.blocks:
            known, before = parents.follow(block, parent)
            if known and before != parent:
                was = "the first block" if before is None else f"after {before}"
                now = "the first block" if parent is None else f"after {parent}"
                raise ConfigError(
                    f"{path}, line {requests}: hash id {block} is {now}, and was {was} in an earlier line: equal ids "
                    "must mean equal prefixes"
                )
            run += known
            parent = block
        prompt_tokens += request.tokens
        blocks += len(request.blocks)
        hit_blocks += run
        hit_tokens += usable_tokens(run, request.tokens, block_tokens)
    if not requests:
        raise ConfigError(f"{path} has no request")
    return Survey(
        requests=requests,
        seconds=(last - first) / 1e3,
        prompt_tokens=prompt_tokens,
        blocks=blocks,
        distinct_blocks=parents.known,
        hit_tokens=hit_tokens,
        hit_blocks=hit_blocks,
    )


class _Parents:
    """Which block each block follows. Numbers in the order of their first use, as published traces have them, take 8
    bytes each; others what a dict takes, some 100."""

    _SPARE = 1 << 16
    _UNKNOWN, _NOBODY, _OFFSET = 0, 1, 2

    def __init__(self) -> None:
        self.known = 0
        self._near = array("Q")  # by id: the parent's + _OFFSET
        self._far: dict[int, int | None] = {}

    def follow(self, block: int, parent: int | None) -> tuple[bool, int | None]:
        """(whether `block` was known, and its parent); one that was not is known from now on, after `parent`."""
        near = self._near
        if block < len(near) and (code := near[block]):
            return True, None if code == self._NOBODY else code - self._OFFSET
        if self._far and block in self._far:
            return True, self._far[block]
        self.known += 1
        if block < 4 * self.known + self._SPARE and (parent is None or parent < 1 << 62):
            if block >= len(near):
                near.frombytes(bytes(8 * (block + block // 8 + 1 - len(near))))
            near[block] = self._NOBODY if parent is None else parent + self._OFFSET
        else:
            self._far[block] = parent
        return False, None
