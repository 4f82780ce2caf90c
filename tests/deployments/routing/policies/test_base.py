"""What a routing policy is told about a request."""

from __future__ import annotations

import pytest

from app.deployments.routing.policies.base import EXPECTED_TOKENS, RouteQuery
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams


@pytest.mark.parametrize(("max_tokens", "counted"), [(5, 5), (100_000, EXPECTED_TOKENS), (None, EXPECTED_TOKENS)])
def test_a_large_max_tokens_counts_in_part(max_tokens: int | None, counted: int) -> None:
    query = RouteQuery.of(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=max_tokens)))
    assert (query.num_prompt_tokens, query.max_tokens, query.num_tokens) == (3, counted, 3 + counted)
