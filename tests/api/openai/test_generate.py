"""POST /generate: flat bodies, texts behind their prompt, lines of JSON as a stream."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

from app.errors import EngineDeadError


def lines(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines() if line]


def test_texts_begin_with_the_prompt(http: httpx.Client, client: Any) -> None:
    client.script = lambda request: [50, 51, 52 + request.choice_index]
    body = {"prompt": "To be", "n": 2, "temperature": 0.5, "max_tokens": 9, "stop": ["###"]}
    answer = http.post("/generate", json=body)
    tokenizer = client.models["m"].tokenizer
    expected = ["To be" + tokenizer.decode([50, 51, 52 + i]) for i in range(2)]
    assert answer.json() == {"text": expected}
    request = client.requests[-1]
    assert request.prompt_token_ids == tokenizer.encode("To be")
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.stop) == (9, 0.5, ("###",))
    streamed = http.post("/generate", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    shown = [line["text"] for line in lines(streamed.text)]
    assert shown[-1] == expected
    for before, after in pairwise(shown):
        assert all(new.startswith(old) for old, new in zip(before, after, strict=True))
    assert len(shown) > 2


def test_the_default_is_16_tokens(http: httpx.Client, client: Any) -> None:
    http.post("/generate", json={"prompt": "x", "request_id": "mine"})
    assert client.requests[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"n": 99}, "n"),
        ({"logprobs": 2}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"foo": 1}, "foo"),
        ({"model": "other"}, "model"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/generate", json={"prompt": "x", **fields})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_stream_that_breaks_says_so_in_its_last_line(http: httpx.Client, client: Any) -> None:
    client.script = lambda request: [50] * 5
    client.fail_after = (2, EngineDeadError("it broke"))
    answer = lines(http.post("/generate", json={"prompt": "x", "stream": True}).text)
    assert list(answer[0]) == ["text"]
    assert "it broke" in answer[-1]["error"]["message"]
