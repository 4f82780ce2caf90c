"""/v1/responses/compact as the openai SDK sees it: a summary stands for the conversation."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import CompactedResponse

from app.api.openai.responses_items import unpacked

LONG: Any = [
    {"role": "user", "content": "Count the foxes."},
    {"role": "assistant", "content": "There are three foxes, said at length. " * 3},
    {"role": "user", "content": "And the dogs?"},
]


def say(client: Any, served_model: Any, text: str) -> None:
    client.script = lambda request: served_model.tokenizer.encode(text, False)


def prompt_of(client: Any, served_model: Any) -> str:
    return str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))


def test_a_conversation_goes_on_from_its_summary(sdk: openai.OpenAI, client: Any, served_model: Any) -> None:
    say(client, served_model, "Three foxes; dogs are to be counted.")
    compacted = sdk.responses.compact(model="m", input=LONG, instructions="Be brief.")
    assert isinstance(compacted, CompactedResponse)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "message", "compaction"]
    assert compacted.usage.output_tokens > 0
    assert unpacked(compacted.output[-1].encrypted_content) == "Three foxes; dogs are to be counted."  # type: ignore[union-attr]
    assert "Sum up our conversation" in prompt_of(client, served_model)
    items: Any = [item.to_dict() for item in compacted.output]
    response = sdk.responses.create(model="m", input=[*items, {"role": "user", "content": "Go on."}])
    prompt = prompt_of(client, served_model)
    assert "said at length" not in prompt
    for text in ("Count the foxes.", "And the dogs?", "Three foxes; dogs are to be counted.", "Go on."):
        assert text in prompt
    again = sdk.responses.compact(model="m", previous_response_id=response.id)
    assert "Three foxes" in prompt_of(client, served_model), "an earlier summary is summed up, too"
    assert [item.type for item in again.output] == ["message"] * 3 + ["compaction"]


def test_what_does_not_fit_is_summed_up_without_its_oldest_turns(
    sdk: openai.OpenAI, client: Any, served_model: Any
) -> None:
    turns: Any = [turn for i in range(40) for turn in ({"role": "user", "content": f"Number {i}?"}, LONG[1])]
    sdk.responses.compact(model="m", input=turns)
    request = client.requests[-1]
    assert len(request.prompt_token_ids) + request.sampling.max_tokens <= served_model.max_model_len
    assert request.sampling.max_tokens == served_model.max_model_len // 4


def test_a_model_that_says_nothing_costs_nothing(http: httpx.Client, client: Any) -> None:
    client.script = lambda request: []
    answer = http.post("/v1/responses/compact", json={"input": "hi"})
    assert answer.status_code == 500
    assert "no summary" in answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/responses/compact", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
