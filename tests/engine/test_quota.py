"""A job that is larger than its namespace's quota: the head is kept, and the rest is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer import writer
from kvxfer.store import Access
from tests.engine.rig import Node
from tests.engine.test_admission import MODEL, SLOT, reasons
from tests.engine.test_observed import outcomes
from tests.store.test_shares import set_quota


def test_of_a_job_that_is_larger_than_the_quota_the_head_is_kept(
    tmp_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_LEAST", 3)
    monkeypatch.setattr(writer, "BATCH_MOST", 3)
    with Node(tmp_root, MODEL) as node:
        set_quota(tmp_root, node.writer.digest, "--at-most", 7 * SLOT)
        one = Access()
        assert reasons(node.put(range(12), access=one)) == dict.fromkeys(range(7, 12), "no_space")
        assert reasons(node.put([12, 13], access=one)) == {0: "no_space", 1: "no_space"}
        assert node.put([0, 6], access=one).bitmap.all(), "what is there is there"
        assert outcomes(node.writer, "store") == {"stored": 7, "no_space": 7, "present": 2}
        assert node.writer.metrics().value("kvxfer_device_written_bytes_total") == 7 * SLOT


def test_nothing_is_stored_behind_the_gap_of_a_full_namespace(tmp_root: Path) -> None:
    with Node(tmp_root, MODEL) as node:
        assert node.put(range(6)).bitmap.all()
        digest = node.writer.digest
        pinned = node.store.pin(digest, node.store.keys(digest))
        set_quota(tmp_root, digest, "--at-most", 10 * SLOT)
        one = Access()
        assert reasons(node.put(range(6, 14), access=one)) == dict.fromkeys(range(4, 8), "no_space")
        node.store.unpin(pinned)
        assert reasons(node.put([14, 15], access=one)) == dict.fromkeys(range(2), "no_space"), "there would be room now"
        assert node.put([14, 15], access=Access()).bitmap.all()
