"""/tokenize and /detokenize agree with what generation counts."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


def test_prompt(http: httpx.Client, client: Any) -> None:
    text = "Grüße 🙂 <|im_end|> fox"
    answer = http.post("/tokenize", json={"model": "m", "prompt": text, "return_token_strs": True}).json()
    tokenizer = client.models["m"].tokenizer
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert answer["token_strs"] == [tokenizer.id_to_token(token) for token in answer["tokens"]]
    back = http.post("/detokenize", json={"model": "m", "tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    completion = http.post("/v1/completions", json={"prompt": text}).json()
    assert completion["usage"]["prompt_tokens"] == answer["count"]


def test_messages(http: httpx.Client, client: Any) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    answer = http.post("/tokenize", json=body).json()
    chat = http.post("/v1/chat/completions", json=body).json()
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    assert client.requests[-1].prompt_token_ids == answer["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
def test_bad_bodies(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
