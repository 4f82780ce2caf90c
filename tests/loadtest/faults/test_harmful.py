"""The harms of the deployment that `poison` and `garbled_kv_events` strike."""

from __future__ import annotations

from app.records.kv_events import KVEventLog
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from loadtest.faults.harmful_app import Garbler, is_poisonous
from loadtest.faults.mix import POISON_SEED


def test_only_its_own_seed_is_poisonous() -> None:
    for seed, expected in ((POISON_SEED, True), (7, False), (None, False)):
        assert is_poisonous(EngineRequest("a", [1, 2], SamplingParams(seed=seed))) == expected


def test_news_are_lost_doubled_or_made_up() -> None:
    """What the log mirrors afterwards is neither all that was stored nor only that."""
    log = KVEventLog("replica", "1")
    garbler = Garbler(log)
    stored = [bytes([number]) * 16 for number in range(200)]
    for block_hash in stored:
        garbler.report_stored(b"", [block_hash])
    log.flush()
    told = {block_hash for event in log.snapshot().events for block_hash in event.split()}
    assert 0 < len(told & set(stored)) < len(stored)
    assert told - set(stored)
