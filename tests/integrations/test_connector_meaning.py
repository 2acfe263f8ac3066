"""What KvxferConnector's bytes mean beyond tokens and weights: what vLLM is told at its start, and adapters."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.testing import FaultyIO
from tests.integrations.connector_rig import Server, configs, setup_of, whole_cache
from tests.integrations.harness import ReqContext, keys_of

pytestmark = pytest.mark.vllm


def digest(root: Path, **how: Any) -> bytes:
    return setup_of(*configs(root, **how)).namespace.digest(0)


def config(**fields: Any) -> Any:
    return SimpleNamespace(to_dict=lambda: {"rope_theta": 10000.0} | fields)


LONG = {"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}
OLD_LONG = {"text_config": {"rope_scaling": {"type": "su", "original_max_position_embeddings": 4096}}}


@pytest.mark.parametrize("rope", [LONG, OLD_LONG], ids=["longrope", "su, nested"])
def test_a_rope_that_hangs_on_the_longest_sequence(tmp_root: Path, rope: dict[str, Any]) -> None:
    """vLLM takes the long factors for all tokens where max_model_len asks for it: the same prompt has other keys."""

    def of(length: int, **fields: Any) -> bytes:
        return digest(tmp_root, model_config__hf_config=config(**fields), model_config__max_model_len=length)

    assert of(4096, **rope) != of(131072, **rope)
    assert of(4096, **rope) == of(4096, **rope)
    assert of(4096) == of(131072)  # of others only the length of a table


def test_weights_that_are_not_those_of_the_files(tmp_root: Path) -> None:
    plain = digest(tmp_root)
    assert digest(tmp_root, load_config=SimpleNamespace(load_format="safetensors")) == plain
    found = {
        plain,
        digest(tmp_root, load_config=SimpleNamespace(load_format="dummy")),
        digest(tmp_root, model_config__quantization_config={"linear": "fp8"}),
        digest(tmp_root, model_config__quantization_config={"linear": "mxfp8"}),
    }
    assert len(found) == 4


def test_what_becomes_of_pictures(tmp_root: Path) -> None:
    """vLLM's hash names a picture, and not what its server makes of all of them."""

    def of(**given: Any) -> bytes:
        return digest(tmp_root, model_config__multimodal_config=SimpleNamespace(**given))

    plain = digest(tmp_root)
    assert of(mm_processor_kwargs=None, video_pruning_rate=None) == plain
    assert len({plain, of(mm_processor_kwargs={"num_crops": 4}), of(mm_processor_kwargs={"num_crops": 16}),
                of(video_pruning_rate=0.5)}) == 4  # fmt: skip


def test_requests_with_an_adapter_are_left_alone(tmp_root: Path) -> None:
    """vLLM's hash knows an adapter by its name and path (0.28: its name, as if it were a salt), not by its weights."""
    from kvxfer.integrations.vllm_connector import KvxferConnector

    with Server(tmp_root, 1, whole=whole_cache()) as server:

        def stock(request: Any) -> None:
            server.manager.on_new_request(ReqContext(req_id=request.request_id))

        connector = KvxferConnector.__new__(KvxferConnector)
        connector._requests = {}
        connector.connector_scheduler = SimpleNamespace(manager=server.manager, on_new_request=stock)
        plain, tuned = ReqContext(req_id="plain"), ReqContext(req_id="tuned")
        connector.on_new_request(SimpleNamespace(request_id="plain", lora_request=None))
        connector.on_new_request(SimpleNamespace(request_id="tuned", lora_request=SimpleNamespace(lora_name="a")))
        assert server.store(range(3), plain) == keys_of(range(3))
        assert server.hits(range(3), plain) == [0, 1, 2] and server.hits(range(3), tuned) == []
        answer = server.manager.prepare_store(keys_of([5]), tuned)
        assert answer is not None and answer.keys_to_store == [] and answer.evicted_keys == []
        assert server.hits([5], plain) == []
        server.manager.on_request_finished(tuned)
        assert not server.manager._left_out


@pytest.mark.parametrize("fault", ["fail", "hang"])
def test_a_reset_for_new_weights_holds_although_the_drive_does_not_take_it(tmp_root: Path, fault: str) -> None:
    keys = {"reset_on_drain": True, "drain_timeout_s": 0.3}
    with Server(tmp_root, 1, whole=whole_cache(), keys=keys) as server, FaultyIO() as io:
        request = server.request("a")
        server.store(range(3), request)
        rule = io.fail("rename", errno.EIO) if fault == "fail" else io.hang("rename")
        start = time.monotonic()
        server.manager.reset_cache()
        assert time.monotonic() - start < 30 and rule.hits
        assert server.hits(range(3), request) == []
        assert server.load([0], request, [12]) == {12}
        server.manager.shutdown()
        assert time.monotonic() - start < 60


@pytest.mark.parametrize("reset", [True, False])
def test_what_was_computed_before_a_reset_is_not_stored_after_it(tmp_root: Path, reset: bool) -> None:
    """vLLM offers all chunks of requests that go on anew then; theirs may be keys and values of the old weights."""
    with Server(tmp_root, 1, whole=whole_cache(), keys={"reset_on_drain": reset}) as server:
        running = server.request("running")
        server.store([0], running)
        server.manager.reset_cache()
        later = server.request("later")
        end = time.monotonic() + 10
        while not server.store([8], later):  # the new epoch's namespace is open
            assert time.monotonic() < end
        stored = server.store([0, 1], running)
        assert stored == ([] if reset else keys_of([1]))
        assert server.hits([0, 1, 8], later) == ([8] if reset else [0, 1, 8])
        server.manager.on_request_finished(running)
        assert server.store([0], server.request("running")) == (keys_of([0]) if reset else [])


def test_requests_miss_after_a_report_that_could_not_be_taken_in(tmp_root: Path) -> None:
    """What failed of their loads is not known then: a hit on it would be loaded again, for ever."""
    with Server(tmp_root, 1, whole=whole_cache()) as server:
        request = server.request("a")
        server.store(range(3), request)
        coordinator = server.manager._coordinator
        settle, collect = coordinator.settle, coordinator._collect

        def broken(*_: Any) -> Any:
            raise RuntimeError("a defect")

        coordinator.settle = broken
        server.step()
        coordinator.settle = settle
        assert server.hits(range(3), request) == [] and server.hits(range(3), server.request("b")) == [0, 1, 2]
        coordinator._collect = broken
        assert server.manager.has_pending_work() is False
        coordinator._collect = collect
