"""Prompts that travel together come out as they went in."""

from __future__ import annotations

import pickle
from dataclasses import replace

from app.records.adapter import AdapterAsk
from app.records.bundle import bundled, parts_of
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest, Placement

ADAPTER = AdapterAsk("pirate", b"digest")


def request(number: int, length: int, second_text_at: int | None = None) -> EngineRequest:
    params = PoolingParams(task="classify", second_text_at=second_text_at)
    tokens = [100 * number + i for i in range(length)]
    return EngineRequest(f"r-{number}", tokens, params, placement=Placement(3, b"root"), asks=(ADAPTER,))


def test_parts_are_what_was_bundled() -> None:
    given = [request(0, 4), request(1, 1, 1), request(2, 7, 3)]
    whole = pickle.loads(pickle.dumps(bundled(given)))
    assert whole.num_prompts == 3
    assert whole.num_known_tokens == 12
    parts = parts_of(whole)
    assert len({part.request_id for part in parts}) == 3
    for part, one in zip(parts, given, strict=True):
        assert replace(part, request_id=one.request_id, arrival_time=one.arrival_time) == one
        assert part.num_prompts == 1


def test_one_prompt_is_no_bundle() -> None:
    one = request(0, 5)
    assert bundled([one]) is one
    assert parts_of(one) == [one]
    assert one.num_prompts == 1
