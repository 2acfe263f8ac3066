"""What vLLM's calls of one request do to a chunk is one use, in the tier and in the connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.policy import POLICIES
from tests.integrations.connector_rig import Server, compat
from tests.integrations.harness import HIT, Rig, key_of, keys_of
from tests.store.test_access import state_of

pytestmark = pytest.mark.vllm
N = 8
named = pytest.mark.parametrize("policy", POLICIES)


def placed(request: Any) -> Any:
    """As vLLM's scheduler leaves it, where it says where in a request a key ends."""
    if (place := getattr(request, "set_offload_key_position", None)) is not None:
        for n in range(N):
            place(key_of(n), 32 * (n + 1))
    return request


def tier_after(root: Path, policy: str, do: Callable[[Rig, Any], None]) -> list[Any]:
    with Rig(root, policy=policy) as rig:
        rig.fill()
        assert rig.store(range(N), rig.request("first")).success
        assert rig.store(range(N, N + 3), rig.request("second")).success
        do(rig, rig.request("a"))
        assert rig.store([N + 3], rig.request("last")).success  # the touches before it have counted
        return state_of(rig.tier._store)


@named
def test_the_tiers_calls_of_one_request_are_one_use(tmp_path: Path, policy: str) -> None:
    def touch(rig: Rig, request: Any) -> None:
        rig.tier.touch(keys_of(range(N)), request)

    def everything(rig: Rig, request: Any) -> None:
        for _ in range(2):
            assert rig.lookups(range(N), request) == [HIT] * N
            touch(rig, request)
            assert rig.load(range(N), request).success
            assert rig.store(range(N), request).success
        rig.tier.on_request_finished(request)

    assert tier_after(tmp_path / "all", policy, everything) == tier_after(tmp_path / "one", policy, touch)


@pytest.mark.parametrize("policy", ["s3fifo"])
def test_another_request_is_another_use(tmp_path: Path, policy: str) -> None:
    def requests(names: str) -> Callable[[Rig, Any], None]:
        def load(rig: Rig, _: Any) -> None:
            assert all(rig.load(range(N), rig.request(name)).success for name in names)

        return load

    assert tier_after(tmp_path / "one", policy, requests("a")) != tier_after(tmp_path / "two", policy, requests("ab"))


@named
def test_a_requests_later_stores_follow_what_it_has_loaded(tmp_path: Path, policy: str) -> None:
    with Rig(tmp_path, policy=policy) as rig:
        rig.fill()
        assert rig.store(range(4), placed(rig.request("first"))).success
        request = placed(rig.request("a"))
        assert rig.load(range(4), request).success
        assert rig.store(range(4, N), request).success
        policy_of = next(iter(rig.tier._store._table.slabs())).policy
        assert [entry.key for entry in policy_of.victims(N)] == keys_of(range(N - 1, -1, -1))


@pytest.mark.skipif(compat.vllm_release() == "0.28", reason="this vLLM does not say where in a request a key ends")
def test_positions_put_keys_in_order_that_come_in_none(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.fill()
        request = placed(rig.request("a"))
        assert rig.store([5, 7, 6], request).success
        assert rig.store([1, 0, 3, 2, 4], request).success
        policy = next(iter(rig.tier._store._table.slabs())).policy
        order = [entry.key for entry in policy.victims(N)]
        assert order.index(key_of(7)) < order.index(key_of(6)) < order.index(key_of(5))
        assert [key for key in order if key in keys_of(range(5))] == keys_of([4, 3, 2, 1, 0])


def connector_after(root: Path, policy: str, do: Callable[[Server, Any], None]) -> list[Any]:
    with Server(root, keys={"policy": policy}) as server:
        assert server.store(range(N), server.request("first")) == keys_of(range(N))
        assert server.store(range(N, N + 3), server.request("second")) == keys_of(range(N, N + 3))
        do(server, server.request("a"))
        return state_of(server.stores[0])


@named
def test_the_connectors_calls_of_one_request_are_one_use(tmp_path: Path, policy: str) -> None:
    def touch(server: Server, request: Any) -> None:
        server.manager.touch(keys_of(range(N)), request)

    def everything(server: Server, request: Any) -> None:
        for _ in range(2):
            assert [server.manager.lookup(key, request) for key in keys_of(range(N))] == [HIT] * N
            touch(server, request)
            assert not server.load(range(N), request, range(N))
            assert server.store(range(N), request) == []
        server.manager.on_request_finished(request)

    assert connector_after(tmp_path / "all", policy, everything) == connector_after(tmp_path / "one", policy, touch)


def test_the_connectors_later_stores_follow_what_was_loaded(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        server.store(range(4), placed(server.request("first")))
        request = placed(server.request("a"))
        assert not server.load(range(4), request, range(4))
        server.store(range(4, N), request)
        policy = next(iter(server.stores[0]._table.slabs())).policy
        assert [entry.key for entry in policy.victims(N)] == keys_of(range(N - 1, -1, -1))
