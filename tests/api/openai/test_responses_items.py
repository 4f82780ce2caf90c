"""References to items that are kept: the item stands in their place."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from app.api.openai.responses_answer import item_id, response_of
from app.api.openai.responses_items import packed, unpacked


def prompt_of(client: Any, served_model: Any) -> str:
    return str(served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False))


@pytest.mark.parametrize("has_type", [True, False])
def test_items_are_found_by_their_ids(sdk: openai.OpenAI, client: Any, served_model: Any, has_type: bool) -> None:
    client.script = lambda request: served_model.tokenizer.encode("The quick fox.", False)
    first = sdk.responses.create(model="m", input="Who?")
    (asked,) = sdk.responses.input_items.list(first.id).data
    kind = {"type": "item_reference"} if has_type else {}
    given: Any = [{**kind, "id": asked.id}, {**kind, "id": first.output[0].id}, {"role": "user", "content": "More?"}]
    second = sdk.responses.create(model="m", input=given)
    prompt = prompt_of(client, served_model)
    assert "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nThe quick fox.<|im_end|>" in prompt
    counted = sdk.responses.input_tokens.count(model="m", input=given)
    assert counted.input_tokens == second.usage.input_tokens  # type: ignore[union-attr]
    kept = sdk.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in kept] == ["message"] * 3, "items, not references"
    sdk.responses.delete(first.id)
    sdk.responses.create(model="m", input="and", previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError, match="no item is kept"):
        sdk.responses.create(model="m", input=given)


@pytest.mark.parametrize("wrong", ["x", "msg_1", "msg_" + "0" * 36, "resp_" + "0" * 32, "msg_" + "f" * 36])
def test_an_id_that_names_nothing_is_a_404(http: httpx.Client, wrong: str) -> None:
    answer = http.post("/v1/responses", json={"input": [{"type": "item_reference", "id": wrong}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_not_found")


def test_an_item_s_id_tells_its_response() -> None:
    response_id = "resp_" + "0123456789abcdef" * 2
    for index in (0, 9, 1 << 15, 1 << 16, 1 << 20):
        assert response_of(item_id("msg", response_id, index)) == response_id
    assert len({item_id("msg", response_id, index) for index in range(1000)}) == 1000
    assert response_of("msg_0") is None


def test_a_summary_is_packed_and_unpacked() -> None:
    for text in ("", "a", "ä\n" * 1000, "\x00"):
        assert unpacked(packed(text)) == text
    for wrong in ("", "gAAAA", "manta1:@", "manta1:/w=="):
        with pytest.raises(ValueError, match=r"."):
            unpacked(wrong)
