"""The roots of a tier: opened together, each with an engine of its own over vLLM's rows. Needs no vLLM."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvxfer.admission import SecondTouch
from kvxfer.convert.pages import KVPages
from kvxfer.engine import TransferEngine
from kvxfer.integrations.vllm_config import TierConfig
from kvxfer.integrations.vllm_journal import Journal, policies
from kvxfer.keys import Namespace
from kvxfer.layout import row_mapping
from kvxfer.spread import SpreadEngine
from kvxfer.store import Store


class Roots:
    """One root, or several on drives of their own behind one engine's face.

    Args:
        rows: uint8 [num_rows * row_bytes], vLLM's primary tier.
        journal: hears of chunks that come and go, in whatever root.

    Raises:
        KvxferError: a root that cannot be opened; those before it were closed again.
    """

    engine: TransferEngine | SpreadEngine

    def __init__(
        self, config: TierConfig, namespace: Namespace, rows: NDArray[np.uint8], num_rows: int, journal: Journal
    ) -> None:
        policy = policies(config.policy, journal)
        names = config.engine.second_touch_names
        second_touch = SecondTouch(names) if names else None  # one for all roots
        self.stores: list[Store] = []
        self._engines: list[TransferEngine] = []
        with ExitStack() as undo:
            for each in config.stores:
                store = Store.open(each, writers=config.engine.io_threads, policy=policy)
                undo.callback(store.close)
                mapping = row_mapping(len(rows) // num_rows, alignment=store.alignment)
                pages = KVPages(mapping, [rows], num_rows)
                engine = TransferEngine(
                    store, namespace, [pages], config=config.engine, live=False, second_touch=second_touch
                )
                undo.callback(engine.shutdown)
                self.stores.append(store)
                self._engines.append(engine)
            undo.pop_all()
        if len(self._engines) == 1:
            self.engine = self._engines[0]
        else:
            self.engine = SpreadEngine(self._engines, [store.config.capacity_bytes for store in self.stores])

    @property
    def digests(self) -> frozenset[bytes]:
        """Of the namespace, in every root: they have weight epochs of their own."""
        return frozenset(engine.digest for engine in self._engines)

    def close(self) -> None:
        """Gives the roots back; the engine was shut down."""
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)
