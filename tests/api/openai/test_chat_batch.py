"""Several conversations in one call."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
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
        ({"messages": [turn("x"), [{"role": "a king", "content": "x"}]]}, "messages.1.0.role"),
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


def test_what_all_share_is_bounded_for_all_together(http: httpx.Client, client: Any) -> None:
    """Each conversation is a body of its own with all of the shared fields: 12 of 20 kB are 240 kB, of 200 kB."""
    body = {"messages": [turn("x")] * 12, "metadata": {"a": "b" * 20_000}}
    refused = http.post(URL, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (413, "messages")
    assert "12 conversations with 200" in refused.json()["error"]["message"]
    assert not client.requests


def test_the_choices_of_all_conversations_count(client: Any, http_to: Any) -> None:
    http = http_to(create_app(client, RequestLimits(max_choices=6)))
    refused = http.post(URL, json={"messages": [turn("x")] * 4, "n": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "8 choices; at most 6" in refused.json()["error"]["message"]
    assert not client.requests
    assert len(http.post(URL, json={"messages": [turn("x")] * 3, "n": 2}).json()["choices"]) == 6


@pytest.mark.parametrize("n", [1, 2])
def test_many_conversations_leave_rows_to_others(served_model: Any, make_client: Any, serve: Any, n: int) -> None:
    client = make_client(dataclasses.replace(served_model, max_num_seqs=8))
    client.delay_s = 0.001
    most = 0

    def watch(request: Any) -> list[int]:
        nonlocal most
        most = max(most, client.num_running)
        return [20, 21]

    client.script = watch
    with httpx.Client(base_url=serve(client).url, timeout=limits.patience_s()) as http:
        answer = http.post(URL, json={"messages": [turn("x")] * 16, "n": n})
    assert len(answer.json()["choices"]) == 16 * n
    assert most == 6


def test_each_choice_has_the_token_ids_of_its_own_prompt(http: httpx.Client, client: Any) -> None:
    answer = http.post(URL, json={"messages": [turn("one"), turn("the other")], "return_token_ids": True}).json()
    asked = {tuple(request.prompt_token_ids) for request in client.requests}
    told = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert {tuple(ids) for ids in told} == asked
    assert len(told[0]) < len(told[1])
    assert answer["prompt_token_ids"] is None
