"""Malformed requests are refused by name and hurt nobody: never a 500, never a hang, never a wrong neighbour."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.chat.chat_request import ChatRequest
from app.api.openai.completions import CompletionRequest
from app.api.server.app import create_app
from app.config.limits import RequestLimits

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 8),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
messages = st.lists(
    st.one_of(
        values,
        st.fixed_dictionaries(
            {"role": st.sampled_from(["user", "assistant", "tool", "nobody"])},
            optional={"content": values, "tool_calls": values, "name": values},
        ),
    ),
    max_size=3,
)


def fields(model: Any) -> Any:
    names = st.one_of(st.sampled_from(sorted(model.model_fields)), st.text(max_size=8))
    return st.dictionaries(names, values, max_size=4)


def post(app: Any, path: str, body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        json_type = {"content-type": "application/json"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.post(path, content=json.dumps(body).encode(), headers=json_type)

    return asyncio.run(send())


@pytest.fixture
def app(client: Any) -> Any:
    return create_app(client, RequestLimits(max_n=4, max_prompts=4))


def check(app: Any, client: Any, path: str, body: Any) -> None:
    response = post(app, path, body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    assert client.num_running == 0
    good = post(app, "/v1/completions", {"prompt": "the fox", "max_tokens": 2})
    assert good.json()["choices"][0]["text"]


quiet = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quiet
@given(extra=fields(ChatRequest), chat=messages)
def test_chat(app: Any, client: Any, extra: dict[str, Any], chat: Any) -> None:
    check(app, client, "/v1/chat/completions", {"messages": chat or [{"role": "user", "content": "hi"}], **extra})


@quiet
@given(extra=fields(CompletionRequest), prompt=st.one_of(values, st.just("the fox")))
def test_completions(app: Any, client: Any, extra: dict[str, Any], prompt: Any) -> None:
    check(app, client, "/v1/completions", {"prompt": prompt, **extra})


@quiet
@given(body=values, path=st.sampled_from(["/tokenize", "/detokenize", "/v1/completions", "/v1/chat/completions"]))
def test_any_body(app: Any, body: Any, path: str) -> None:
    response = post(app, path, body)
    assert response.status_code in (200, 400)
