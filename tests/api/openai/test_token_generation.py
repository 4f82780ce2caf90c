"""Token ids in, token ids out; and streams in pieces of several tokens."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from app.api.openai import logprobs

ROUTE = "/inference/v1/generate"


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_tokens_in_tokens_out(http: httpx.Client, client: Any) -> None:
    client.script = lambda request: [30, 31, 32]
    eos = client.models["m"].tokenizer.eos_token_id
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"logprobs": 1, "prompt_logprobs": 0, "n": 2}}
    answer = http.post(ROUTE, json={**body, "request_id": "mine", "cache_salt": "s", "priority": 3})
    assert answer.headers["x-request-id"] == answer.json()["request_id"] == "mine"
    request = client.requests[-1]
    assert (request.prompt_token_ids, request.placement.priority, request.sampling.max_tokens) == ([5, 6, 7], 3, 509)
    assert request.sampling.max_tokens == client.models["m"].max_model_len - 3, "what the context holds"
    choices = answer.json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [[30, 31, 32, eos]] * 2
    assert [entry["token"] for entry in choices[0]["logprobs"]["content"]] == [
        f"token_id:{i}" for i in (30, 31, 32, eos)
    ]
    assert list(answer.json()["prompt_logprobs"][1]) == ["6"]
    streamed = events(http.post(ROUTE, json={"token_ids": [5], "sampling_params": {}, "stream": True}).text)
    assert [i for chunk in streamed for i in chunk["choices"][0]["token_ids"]] == [30, 31, 32, eos]
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed] == [None, None, None, "stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_zero_are_those_of_the_tokens(http: httpx.Client, client: Any, stream: bool) -> None:
    client.script = lambda request: [30, 31]
    body = {"token_ids": [5], "sampling_params": {"logprobs": 0, "detokenize": False}, "stream": stream}
    answer = http.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    found = [chunk["choices"][0] for chunk in (events(answer.text) if stream else [answer.json()])]
    content = [entry for choice in found for entry in choice["logprobs"]["content"]]
    assert len(content) == 3
    for entry in content:
        assert entry["top_logprobs"] == [{name: entry[name] for name in ("token", "logprob", "bytes")}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"n": 99}}, "sampling_params.n"),
        ({"sampling_params": {"foo": 1}}, "sampling_params.foo"),
        ({"sampling_params": {"stop": ["a"] * 9}}, "sampling_params.stop"),
        ({"features": {}}, "features"),
        ({"foo": 1}, "foo"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(ROUTE, json={"token_ids": [5], "sampling_params": {}, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text


def test_stream_interval(http: httpx.Client, client: Any) -> None:
    """The first token at once, then pieces, then the rest; text, logprobs and finish are those of single tokens."""
    client.script = lambda request: list(range(30, 37))
    body = {"prompt": "x", "stream": True, "return_token_ids": True, "logprobs": 1, "max_tokens": 20}
    single, pieces = (
        events(http.post("/v1/completions", json={**body, "stream_interval": interval}).text) for interval in (1, 3)
    )
    sizes = [len(chunk["choices"][0].get("token_ids") or ()) for chunk in pieces]
    assert sizes == [1, 3, 3, 1, 0]
    for name in ("text", "token_ids"):
        first, second = (
            [item for chunk in chunks for item in chunk["choices"][0].get(name) or ()] for chunks in (single, pieces)
        )
        assert first == second
    for name in ("tokens", "text_offset"):
        first, second = (
            [item for c in chunks for item in (c["choices"][0]["logprobs"] or {}).get(name, [])]
            for chunks in (single, pieces)
        )
        assert first == second
    assert [c["choices"][0]["finish_reason"] for c in pieces][-1] == "stop"


def test_predicted_output_changes_nothing(http: httpx.Client, client: Any) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    prediction = {"type": "content", "content": [{"type": "text", "text": "much of it"}]}
    assert (
        http.post("/v1/chat/completions", json={**body, "prediction": prediction}).json()["choices"][0]["message"]
        == plain
    )


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (ROUTE, {"token_ids": [50] * 400, "sampling_params": {"prompt_logprobs": 5}}),
        (ROUTE, {"token_ids": [50], "sampling_params": {"logprobs": 5, "max_tokens": 400}}),
        (
            "/v1/responses",
            {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 5, "max_output_tokens": 400},
        ),
    ],
)
def test_many_logprobs_are_written_off_the_event_loop(
    http: httpx.Client, client: Any, monkeypatch: pytest.MonkeyPatch, route: str, body: dict[str, Any]
) -> None:
    client.script = lambda request: [50] * 400
    threads = set()
    own = logprobs._pairs

    def recording(entry: Any) -> Any:
        threads.add(threading.current_thread().name.partition("_")[0])
        return own(entry)

    monkeypatch.setattr(logprobs, "_pairs", recording)
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    assert threads == {"work"}
