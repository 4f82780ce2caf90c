"""/invocations: one route for the bodies of several."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": HI, "max_tokens": 3, "seed": 1}, "/v1/chat/completions"),
        ({"prompt": "hi", "max_tokens": 3, "seed": 1}, "/v1/completions"),
        ({"messages": HI, "max_tokens": -3}, "/v1/chat/completions"),
        ({"input": "hi"}, "/v1/embeddings"),
        ({"query": "a", "documents": ["b"]}, "/v1/rerank"),
        ({"text_1": "a", "text_2": "b"}, "/v1/score"),
    ],
)
def test_a_body_is_answered_as_on_its_own_route(http: httpx.Client, body: dict[str, Any], path: str) -> None:
    here, there = http.post("/invocations", json=body), http.post(path, json=body)
    assert here.status_code == there.status_code
    dropped = ("id", "created")
    shown = [{k: v for k, v in answer.json().items() if k not in dropped} for answer in (here, there)]
    assert shown[0] == shown[1]


def test_streams_and_faults(http: httpx.Client) -> None:
    streamed = http.post("/invocations", json={"messages": HI, "max_tokens": 3, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")
    for raw, words in ((b"{", "not valid JSON"), (b"[]", "object"), (b'{"x": 1}', "no route takes these fields")):
        answer = http.post("/invocations", content=raw)
        assert answer.status_code == 400
        assert words in answer.text
