"""Several conversations in one call."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests import limits

URL = "/v1/chat/completions/batch"


def turn(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_each_conversation_is_a_choice(http: httpx.Client, client: Any, served_model: Any) -> None:
    def say(request: Any) -> list[int]:
        prompt = served_model.tokenizer.decode(request.prompt_token_ids, False)
        answer: list[int] = served_model.tokenizer.encode("one" if "first" in prompt else "two and more", False)
        return answer

    client.script = say
    body = {"model": "m", "messages": [turn("first"), turn("second")], "temperature": 0}
    answer = http.post(URL, json=body).json()
    alone = [http.post("/v1/chat/completions", json={**body, "messages": turn(t)}).json() for t in ("first", "second")]
    said = [(choice["index"], choice["message"]["content"]) for choice in answer["choices"]]
    assert said == [(0, "one"), (1, "two and more")]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(other["usage"][name] for other in alone)
    assert answer["object"] == "chat.completion"
    assert len(http.post(URL, json={**body, "n": 2}).json()["choices"]) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [turn("x"), [{"role": "king", "content": "x"}]]}, "messages.1.0.role"),
        ({"messages": [turn("x")] * 17}, "messages"),
        ({"stream": True}, "stream"),
        ({"foo": 1}, "foo"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, client: Any, fields: dict[str, Any], param: str) -> None:
    refused = http.post(URL, json={"messages": [turn("x")], **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.num_running == 0


def test_a_client_that_leaves_ends_them_all(server: Any, client: Any) -> None:
    client.gate = asyncio.Event()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:
            asking = asyncio.create_task(http.post(URL, json={"messages": [turn("x")] * 3}))
            await limits.until(lambda: client.num_running == 3)
            asking.cancel()
            await limits.until(lambda: client.num_aborted == 3)

    limits.run(leave())
    assert client.num_running == 0
