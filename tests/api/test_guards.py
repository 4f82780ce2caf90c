"""What one request may ask for, and what a request may bring: limits on headers, bodies, conversations, templates."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.text.chat_template import ChatTemplate
from tests.api.conftest import ScriptedClient
from tests.limits import scaled_s

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 100}}


def post(app: Any, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await http.post(
                path, content=content, headers={"content-type": "application/json", **(headers or {})}
            )

    return asyncio.run(send())


def refused(app: Any, body: Any, path: str = CHAT, headers: dict[str, str] | None = None) -> dict[str, Any]:
    response = post(app, path, body, headers)
    assert 400 <= response.status_code < 500, response.text
    return {"status": response.status_code, **response.json()["error"]}


@pytest.mark.parametrize(
    ("limits", "body", "param"),
    [
        ({"max_messages": 2}, {"messages": HI * 3}, "messages"),
        ({"max_tools": 1}, {"messages": HI, "tools": [TOOL, {**TOOL, "function": {"name": "g"}}]}, "tools"),
        ({"max_tools_bytes": 50}, {"messages": HI, "tools": [TOOL]}, "tools"),
        ({"max_logit_bias": 1}, {"messages": HI, "logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"max_logit_bias": 1}, {"messages": HI, "stop_token_ids": [1, 2]}, "stop_token_ids"),
        ({"max_bad_words": 1}, {"messages": HI, "bad_words": ["a", "b"]}, "bad_words"),
        ({"max_bad_words_chars": 9}, {"messages": HI, "bad_words": ["ten", "letters"]}, "bad_words"),
        ({"max_template_chars": 20}, {"messages": [{"role": "user", "content": "x" * 30}]}, "messages"),
        ({"max_template_s": 1e-9}, {"messages": HI}, "messages"),
    ],
)
def test_limits_of_one_request(client: Any, limits: dict[str, Any], body: Any, param: str) -> None:
    error = refused(create_app(client, RequestLimits(**limits)), body)
    assert (error["status"], error["param"]) == (400, param)
    assert post(create_app(client, RequestLimits()), CHAT, body).status_code == 200


def test_headers(client: Any) -> None:
    app = create_app(client, RequestLimits(max_headers=20, max_header_bytes=1000))
    body = {"messages": HI}
    assert refused(app, body, headers={f"x-{i}": "1" for i in range(20)})["status"] == 431
    assert refused(app, body, headers={"x-large": "1" * 1000})["code"] == "headers_too_large"
    assert refused(app, body, "/v1/messages", {"x-large": "1" * 1000})["type"] == "invalid_request_error"
    assert post(app, CHAT, body).status_code == 200


@pytest.mark.parametrize("depth", [100, 100_000])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth(client: Any, depth: int, opening: str) -> None:
    app = create_app(client, RequestLimits())
    closing = "]" if opening == "[" else "}"
    deep = opening * depth + "1" + closing * depth
    for body in (
        f'{{"messages": {deep}}}',
        f'{{"messages": {json.dumps(HI)}, "chat_template_kwargs": {{"x": {deep}}}}}',
    ):
        assert "more than 64 deep" in refused(app, body.encode())["message"]
    brackets = [{"role": "user", "content": '[{"\\' * depth}]  # in a text they are only text
    assert " deep" not in post(app, CHAT, {"messages": brackets}).text


_CALL = (
    b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "%s"}}]}]}'
)
FAULTY = {
    # JSON inside of a string is parsed too.
    "opening brackets": _CALL % (rb"{\"a\": [" + b"[]," * 1_100_000 + b"[]]}"),
    "1048576 opening brackets": _CALL % (rb"{\"a\": [" + rb"\u005b\u005d," * 1_100_000 + b"[]]}"),
    "2097152 quotes": _CALL % (b"{" + b",".join(rb"\"%d\": 1" % i for i in range(1_100_000)) + b"}"),
    "messages": b'{"messages": [' + b"{}," * 100_000 + b"{}]}",
    "arrays and objects": b'{"messages": [' + b"{}," * 1_000_000 + b"{}]}",
    "2097152 values": b'{"prompt": [1,' + b"1," * 3_000_000 + b"1]}",
    "values": b'{"prompt": [' + b'"",' * 3_000_000 + b'""]}',
    "prompt": b'{"prompt": [1,' + b'"",' * 1_000_000 + b"1]}",
    "logit_bias": b'{"prompt": "x", "logit_bias": {' + b",".join(b'"a%d": 1' % i for i in range(100_000)) + b"}}",
    "members": b"{" + b",".join(b'"a%d": 1' % i for i in range(200_000)) + b"}",
    "valid JSON": b"[" + b"[]," * 65 + b'"' + b'\\"' * 300_000,  # a string without an end
}


@pytest.mark.parametrize("named", FAULTY)
def test_a_body_with_a_fault_in_every_place_costs_no_more_than_one_with_one(client: Any, named: str) -> None:
    """Each took from ten seconds to hours, in which the event loop stood still, and gigabytes."""
    path = CHAT if b'"messages"' in FAULTY[named][:20] else "/v1/completions"
    started = time.process_time()
    assert named in refused(create_app(client, RequestLimits()), FAULTY[named], path)["message"]
    assert time.process_time() - started < scaled_s(5)  # a tenth of a second


def test_a_page_of_an_allowed_origin_may_call(client: Any) -> None:
    app = create_app(client, RequestLimits(), IngressConfig(cors_origins=("https://chat.example",)))
    allowed = post(app, CHAT, {"messages": HI}, {"origin": "https://chat.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert (
        "access-control-allow-origin" not in post(app, CHAT, {"messages": HI}, {"origin": "https://x.example"}).headers
    )


def test_a_request_s_own_template_is_refused_unless_the_server_allows_it(client: Any, served_model: Any) -> None:
    body = {"messages": HI, "chat_template": "<{{ messages[0].content }}>{{ eos_token }}"}
    error = refused(create_app(client, RequestLimits()), body)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported")
    app = create_app(client, RequestLimits(trust_request_chat_template=True))
    assert post(app, CHAT, body).status_code == 200
    assert served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False) == "<hi><|im_end|>"


@pytest.mark.parametrize("words", ["loop", "loop " + "and go on " * 500])  # on the event loop, and in a thread
def test_a_template_that_never_ends_costs_a_400_and_nobody_else(served_model: Any, words: str) -> None:
    """It used to take the event loop, or a thread for each such chat, for good."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if messages[0].content.startswith('loop') %}" + loops + "{% endif %}{{ messages[0].content }}"
    template = ChatTemplate({"default": source}, {})
    client = ScriptedClient(replace(served_model, chat_template=template, max_model_len=100_000))
    app = create_app(client, RequestLimits(max_template_s=0.5))
    for _ in range(3):
        error = refused(app, {"messages": [{"role": "user", "content": words}]})
        assert (error["status"], "more than 0.5 s" in error["message"]) == (400, True)
    assert post(app, CHAT, {"messages": HI}).status_code == 200


def test_a_confined_template_is_rendered_in_a_process_of_its_own(served_model: Any) -> None:
    template = ChatTemplate({"default": "<{{ messages[0].content }}>", "tool_use": "with tools"}, {}, is_confined=True)
    client = ScriptedClient(replace(served_model, chat_template=template))
    assert post(create_app(client, RequestLimits()), CHAT, {"messages": HI}).status_code == 200
    assert served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False) == "<hi>"
