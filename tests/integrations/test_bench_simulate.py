"""vLLM's own policies over a trace, as the bench drives them."""

from __future__ import annotations

import pytest

from bench import simulate
from kvxfer.simulate import read_trace, survey

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # torch's and vLLM's own, as they are imported


@pytest.mark.parametrize("policy", simulate.VLLM_POLICIES)
def test_a_store_that_is_never_full_hits_all_that_can_be_hit(policy: str) -> None:
    if (missing := simulate.whats_missing()) is not None:
        pytest.skip(missing)
    found, requests = survey(simulate.SAMPLE), list(read_trace(simulate.SAMPLE))
    assert simulate.vllm_hits(requests, policy, found.distinct_blocks) == (found.hit_tokens, None)
    few, why = simulate.vllm_hits(requests, policy, found.distinct_blocks // 20)
    assert (0 < few < found.hit_tokens, why) == (True, None)
