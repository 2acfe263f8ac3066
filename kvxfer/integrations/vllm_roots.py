"""The roots of a server, opened together. Needs no vLLM.

A tier's have an engine each over vLLM's rows; a connector's have a coordinator each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvxfer.admission import SecondTouch
from kvxfer.convert.pages import KVPages
from kvxfer.coordinator import Coordinator
from kvxfer.engine import TransferEngine
from kvxfer.integrations.vllm_config import TierConfig
from kvxfer.integrations.vllm_journal import Journal, policies
from kvxfer.keys import Namespace
from kvxfer.layout import row_mapping
from kvxfer.slot import SlotLayout
from kvxfer.spread import SpreadEngine
from kvxfer.spread_coordinator import SpreadCoordinator
from kvxfer.store import Store


class Roots:
    """One root of a tier, or several on drives of their own behind one engine's face.

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
        policy, second_touch = policies(config.store.policy, journal), _second_touch(config)
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


class CoordinatedRoots:
    """One root of a connector, or several on drives of their own behind one coordinator's face.

    Args:
        slot: of a root with a given alignment.
        journal: hears of chunks that come and go, in whatever root.
        ranks, at_hand, stored: as Coordinator's, for each root.

    Raises:
        KvxferError: a root that cannot be opened; those before it were closed again.
    """

    coordinator: Coordinator | SpreadCoordinator

    def __init__(
        self,
        config: TierConfig,
        namespace: Namespace,
        slot: Callable[[int], SlotLayout],
        journal: Journal,
        *,
        ranks: int,
        at_hand: int,
        stored: Callable[[list[bytes]], None],
    ) -> None:
        policy, second_touch = policies(config.store.policy, journal), _second_touch(config)
        self.stores: list[Store] = []
        coordinators: list[Coordinator] = []
        with ExitStack() as undo:
            for each in config.stores:
                store = Store.open(each, writers=config.engine.io_threads, policy=policy)
                undo.callback(store.close)
                coordinator = Coordinator(
                    store, namespace, slot(store.alignment), ranks=ranks, config=config.engine, at_hand=at_hand,
                    stored=stored, second_touch=second_touch,
                )  # fmt: skip
                undo.callback(coordinator.shutdown)
                self.stores.append(store)
                coordinators.append(coordinator)
            undo.pop_all()
        if len(coordinators) == 1:
            self.coordinator = coordinators[0]
        else:
            weights = [store.config.capacity_bytes for store in self.stores]
            self.coordinator = SpreadCoordinator(coordinators, weights)

    def close(self) -> None:
        """Gives the roots back; the coordinator was shut down."""
        with ExitStack() as stack:
            for store in self.stores:
                stack.callback(store.close)


def _second_touch(config: TierConfig) -> SecondTouch | None:
    """One for all roots, if there is to be one."""
    names = config.engine.second_touch_names
    return SecondTouch(names) if names else None
