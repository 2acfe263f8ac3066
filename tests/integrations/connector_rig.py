"""KvxferConnector's parts through vLLM's own types, without an engine: one scheduler's half and the ranks'.

Imports the real vLLM, so whoever imports this is skipped where there is none.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvxfer.tickets import Report, Settled, SpreadTicket, Ticket
from tests.integrations.harness import ReqContext, build, keys_of, offloading_config  # skips where there is no vLLM

with warnings.catch_warnings():  # torch's and vLLM's own, while they are imported
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadPolicy

    from kvxfer.integrations import vllm_compat as compat
    from kvxfer.integrations.vllm_connector import KvxferOffloadingSpec, KvxferWorkerMetadata, _making
    from kvxfer.integrations.vllm_pages import pages_of
    from kvxfer.integrations.vllm_rank import block_table_of
    from kvxfer.integrations.vllm_setup import MODULE, SPEC, ConnectorConfig, setup_of

    importlib.import_module("vllm.v1.attention.backends.cpu_attn")  # as it will be when the kernel is asked for

__all__ = [
    "ConnectorConfig",
    "DIM",
    "HEADS",
    "LAYERS",
    "NAMES",
    "TOKENS",
    "GPULoadStoreSpec",
    "Group",
    "KvxferOffloadingSpec",
    "KvxferWorkerMetadata",
    "MLAAttentionSpec",
    "OffloadPolicy",
    "Server",
    "SlidingWindowSpec",
    "attention",
    "block_table_of",
    "caches_of",
    "compat",
    "configs",
    "make_spec",
    "pages_of",
    "setup_of",
    "torch",
    "whole_cache",
]

LAYERS, HEADS, DIM, TOKENS, BLOCKS = 3, 4, 32, 32, 24
KEYS = {"capacity_bytes": 64 << 20, "weights_fingerprint": "seed 0", "io_threads": 2, "shutdown_timeout_s": 1.0}
NAMES = tuple(f"model.layers.{n}.self_attn.attn" for n in range(LAYERS))


class Group(SimpleNamespace):
    """vLLM's KVCacheGroupSpec, as far as it is looked at."""


def attention(heads: int = HEADS, **changed: Any) -> Any:
    return build(
        FullAttentionSpec,
        **({"block_size": TOKENS, "num_kv_heads": heads, "head_size": DIM, "dtype": torch.float32} | changed),
    )


def configs(
    root: Path,
    *,
    tp_size: int = 1,
    rank: int = 0,
    blocks_per_chunk: int = 1,
    keys: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    spec: Any = None,
    events: bool = False,
    roots: int = 1,
    **changed: Any,
) -> tuple[Any, Any, Any]:
    """(OffloadingConfig, vllm_config, kv_cache_config); `changed`: attributes of vllm_config, by path with dots."""
    where: Any = str(root) if roots == 1 else [str(root / f"drive {number}") for number in range(roots)]
    given = {
        "spec_name": SPEC,
        "spec_module_path": MODULE,
        "kvxfer": {"root_dir": where} | KEYS | (keys or {}),
    } | (extra or {})
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=given, kv_load_failure_policy="recompute"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        model_config=SimpleNamespace(
            model="org/tiny",
            dtype=torch.float32,
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0}),
            get_total_num_kv_heads=lambda: HEADS,
        ),
    )
    for path, value in changed.items():
        *parents, name = path.split("__")
        target: Any = vllm_config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    groups = [Group(layer_names=list(NAMES), kv_cache_spec=spec or attention(max(1, HEADS // tp_size)))]
    caches = SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS, hisparse_host_num_blocks=None)
    offloading = offloading_config(
        1, tp=tp_size, layers=NAMES, tokens=TOKENS, tokens_per_hash=TOKENS, blocks_per_chunk=blocks_per_chunk,
        events=events, extra=given,
    )  # fmt: skip
    object.__setattr__(offloading.parallel, "rank", rank)
    return offloading, vllm_config, caches


def make_spec(offloading: Any, vllm_config: Any, caches: Any) -> Any:
    """As KvxferConnector's constructor has vLLM make it."""
    token = _making.set((vllm_config, caches))
    try:
        return KvxferOffloadingSpec(offloading)
    finally:
        _making.reset(token)


def whole_cache(seed: int = 0) -> torch.Tensor:
    """[layer, K or V, block, head, token, dim]: every rank's pages are cut from it."""
    return torch.randn(LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def caches_of(whole: torch.Tensor, tp_size: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's tensors, as vLLM's CPU attention fills them: of a head and block first all keys, then all values."""
    heads = (
        list(range(HEADS)) if tp_size == 1 else [rank * HEADS // tp_size + h for h in range(max(1, HEADS // tp_size))]
    )
    made = {}
    for layer, name in enumerate(NAMES):
        pages = torch.empty(BLOCKS, len(heads), TOKENS, 2 * DIM)
        keys, values = pages.view(BLOCKS, len(heads), 2 * TOKENS, DIM).chunk(2, dim=2)
        keys.copy_(whole[layer, 0][:, heads])
        values.copy_(whole[layer, 1][:, heads])
        made[name] = pages
    return made


class Server:
    """The manager of one server and the workers of its ranks, and what passes between them."""

    roots = 1

    def __init__(self, root: Path, tp_size: int = 1, *, whole: torch.Tensor | None = None, **how: Any) -> None:
        how = {"roots": self.roots} | how
        self.tp_size, self.per_chunk = tp_size, how.get("blocks_per_chunk", 1)
        self.spec = make_spec(*configs(root, tp_size=tp_size, **how))
        self.manager = self.spec.get_manager()
        self.stores = self.manager._roots.stores
        self.caches = [
            caches_of(torch.zeros(LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM) if whole is None else whole, tp_size, rank)
            for rank in range(tp_size)
        ]
        self.workers = [self._worker(root, rank, how) for rank in range(tp_size)]
        self.jobs = 0
        self.acknowledged: dict[int, int] = {}
        self.invalid: set[int] = set()

    def _worker(self, root: Path, rank: int, how: dict[str, Any]) -> Any:
        spec = make_spec(*configs(root, tp_size=self.tp_size, rank=rank, **how))
        spec.pages = pages_of(spec.setup, self.caches[rank])
        return spec.get_worker(None)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.manager.shutdown()

    def request(self, name: str) -> Any:
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def step(self) -> Any:
        """One pass over the ranks: what they say, merged as vLLM's aggregator does."""
        merged: Any = None
        for worker in self.workers:
            for result in worker.get_finished():
                assert result.success
                self.acknowledged[result.job_id] = self.acknowledged.get(result.job_id, 0) + 1
            self.invalid |= worker.take_invalid()
            mine = KvxferWorkerMetadata.of(None, worker.take_report())
            merged = mine if merged is None else merged.aggregate(mine)
        self.manager.settle(merged.report)
        return merged

    def finish(self, *jobs: int) -> None:
        end = time.monotonic() + 30
        while self.manager.has_pending_work() or any(self.acknowledged.get(job) != self.tp_size for job in jobs):
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)

    def submit(self, call: str, spec: Any, blocks: Sequence[int], first: int = 0) -> int:
        self.jobs += 1
        pages = GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[first])
        for worker in self.workers:
            both = (pages, spec) if call == "submit_store" else (spec, pages)
            assert getattr(worker, call)(self.jobs, *both) is True
        return self.jobs

    def store(self, numbers: Sequence[int], request: Any, blocks: Sequence[int] | None = None) -> list[bytes]:
        """Offers these chunks, and stores what is wanted of them; chunk i is in block i (or `blocks`)."""
        answer = self.manager.prepare_store(keys_of(numbers), request)
        if answer.keys_to_store:
            wanted = [n for n in numbers if keys_of([n])[0] in answer.keys_to_store]
            self.finish(self.submit("submit_store", answer.store_spec, blocks or wanted))
        return list(answer.keys_to_store)

    def load(self, numbers: Sequence[int], request: Any, blocks: Sequence[int], first: int = 0) -> set[int]:
        """Loads chunks into blocks; those that are not valid then."""
        spec = self.manager.prepare_load(keys_of(numbers), request)
        self.invalid = set()
        job = self.submit("submit_load", spec, blocks, first)
        self.finish(job)
        assert self.acknowledged[job] == self.tp_size
        return self.invalid

    def hits(self, numbers: Sequence[int], request: Any) -> list[int]:
        return [n for n in numbers if self.manager.lookup(keys_of([n])[0], request).name == "HIT"]

    def holds(self, whole: torch.Tensor, blocks: dict[int, int]) -> bool:
        """Whether on every rank block b has what block blocks[b] of `whole` has, for each b."""
        for rank, mine in enumerate(self.caches):
            want = caches_of(whole, self.tp_size, rank)
            for name in NAMES:
                if any(not torch.equal(mine[name][here], want[name][there]) for here, there in blocks.items()):
                    return False
        return True

    def on_slot(self, number: int, change: Callable[[bytes], bytes]) -> None:
        """Changes a chunk's slot on the drive."""
        store, digest = self._home(number)
        path, offset, layout = store.locate(digest, keys_of([number])[0])
        with path.open("r+b") as file:
            file.seek(offset)
            old = file.read(layout.slot_bytes)
            file.seek(offset)
            file.write(change(old))

    def forget(self, number: int) -> None:
        """Takes a chunk out of the root that has it."""
        store, digest = self._home(number)
        (entry,) = store.pin(digest, keys_of([number]))
        store.unpin([entry])
        assert store.invalidate(entry, "other")

    def _home(self, number: int) -> tuple[Any, bytes]:
        """The store that has a chunk, and its digest there."""
        both = [(store, digest) for store in self.stores for digest in self.manager._coordinator.digests]
        (home,) = [(store, digest) for store, digest in both if store.contains(digest, keys_of([number])[0])]
        return home

    @property
    def pinned(self) -> int:
        """Entries in use, of all roots."""
        return sum(store.stats().pinned_entries for store in self.stores)

    @staticmethod
    def failures(report: Report, ticket: Ticket | SpreadTicket) -> set[int]:
        """Positions in a ticket that a report says have failed."""
        if isinstance(ticket, Ticket):
            return set(report.settled.get(ticket.number, Settled()).failed)
        parts = [(part, report.roots.get(part.root, Report())) for part in ticket.parts]
        return {
            part.positions[place]
            for part, mine in parts
            for place in mine.settled.get(part.ticket.number, Settled()).failed
        }
