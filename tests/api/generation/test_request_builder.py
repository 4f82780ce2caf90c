"""One builder: HTTP and `LLM` get the same requests, and the same errors."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.generation.request_builder import RequestBuilder
from app.errors import InvalidRequestError
from app.records.bad_words import BadWords
from app.records.request import Placement
from app.records.sampling_params import SamplingParams


def build(model: Any, prompt: list[int], names: dict[str, str] | None = None, **params: Any) -> Any:
    builder = RequestBuilder(model, SamplingParams(**params), Placement(3, tenant="t"), names=names or {})
    return builder.choices("r", prompt)


def test_choices_share_all_but_their_number(served_model: Any) -> None:
    first, second = build(served_model, [50, 51], n=2, bad_words=["fox"])
    assert (first.request_id, second.request_id, second.choice_index) == ("r-0", "r-1", 1)
    assert first.work is second.work, "settled once: one seed"
    assert first.prompt_token_ids is second.prompt_token_ids
    assert first.placement == Placement(3, tenant="t")
    assert first.asked(BadWords)


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([1 << 40], {}, "prompt"),
        ([50] * 512, {}, "prompt"),
        ([50], {"max_tokens": 600}, "max_tokens"),
        ([50], {"min_tokens": 600}, "min_tokens"),
        ([50], {"stop_token_ids": [-1]}, "stop_token_ids"),
        ([50], {"bad_words": [" "]}, "bad_words"),
        ([50], {"thinking_token_budget": 5}, "thinking_token_budget"),
    ],
)
def test_refusals_name_the_field_in_the_dialect_s_words(
    served_model: Any, prompt: list[int], params: dict[str, Any], field: str
) -> None:
    for names, named in ({}, field), ({field: "theirs"}, "theirs"):
        with pytest.raises(InvalidRequestError) as caught:
            build(served_model, prompt, names, **params)
        assert caught.value.param == named
