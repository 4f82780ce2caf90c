"""What the OpenAPI document allows and forbids, and a corpus of malformed bodies: never an answer of the 5xx family,
every refusal in the dialect's shape, and the next valid request is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from app.api.endpoints import bodies
from app.api.server.app import create_app
from app.config.limits import RequestLimits

LIMITS = RequestLimits(max_n=4, max_prompts=4, max_body_bytes=1 << 20)
HI = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": HI, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "m", "messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
BODY_OF = {
    **{"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"},
    **{"/v1/responses": "ResponsesRequest", "/v1/messages": "MessagesRequest"},
    **{"/v1/messages/count_tokens": "CountTokensRequest"},
    **{"/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest"},
}
WRONG: list[Any] = [
    *(True, -1, 0, 1.5, 2**70, -(2**70), float("nan"), float("inf"), "x", "", "\x00\ud7ff", [], {}, [[]], [{}]),
    *(["x"], [-1], [2**40], {"x": 1}, {"type": "x"}, {"type": "json_schema"}, [{"type": "function"}], "9" * 5000),
]
BROKEN: list[bytes] = [
    *(b"", b" ", b"{", b"}", b"null", b"[]", b"1", b'"x"', b"nan", b"{}" * 2, b'{"a":1,}', b"{'a': 1}", b"\xff\xfe{}"),
    *(b"\xef\xbb\xbf{}", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\x"}', b"\x00" * 10),
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    *(b'{"n": ' + b"9" * 100_000 + b"}", b'{"temperature": 1e999999}', b'{"temperature": NaN}'),
    *(b'{"' + b"x" * 100_000 + b'": 1}', b'{"messages": [' + b'{"role":"user"},' * 10_000 + b"{}]}"),
]


def check(response: httpx.Response, path: str) -> None:
    """A success, or a refusal in the shape of the route's dialect."""
    assert response.status_code < 500, (response.status_code, response.text[:500])
    if response.status_code < 300:
        return
    answer = response.json()
    if path.startswith("/v1/messages"):
        assert set(answer) == {"type", "error", "request_id"}
        assert answer["type"] == "error"
        assert {"type", "message"} <= set(answer["error"])
    else:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]


JSON = {"content-type": "application/json"}


async def post_all(app: Any, posts: Iterator[tuple[str, Any]]) -> int:
    """Send bodies one after another, each checked; their number."""
    number = 0
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON) as http:
        for path, body in posts:
            content = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
            check(await http.post(path, content=content), path)
            number += 1
        for path, valid in VALID.items():
            answer = await http.post(path, json=valid)
            assert answer.status_code == 200, (path, answer.text)
    return number


@pytest.fixture
def app(client: Any) -> Any:
    return create_app(client, LIMITS)


def wrong_fields(every: int) -> Iterator[tuple[str, Any]]:
    """Each field of each body with wrong values; only each `every`th pair."""
    models = {body.__name__: body for body in bodies()}
    pairs = [(p, f, v) for p, name in BODY_OF.items() for f in models[name].model_fields for v in WRONG]
    for path, field, value in pairs[::every]:
        yield path, {**VALID[path], field: value}


def test_wrong_types_for_every_field(app: Any, client: Any) -> None:
    assert asyncio.run(post_all(app, wrong_fields(every=7))) > 500
    assert client.num_running == 0


@pytest.mark.slow
def test_all_wrong_types_for_every_field(app: Any, client: Any) -> None:
    assert asyncio.run(post_all(app, wrong_fields(every=1))) > 3000
    assert client.num_running == 0


def test_broken_bodies(app: Any, client: Any) -> None:
    asyncio.run(post_all(app, ((path, body) for path in VALID for body in BROKEN)))
    assert client.num_running == 0


@pytest.mark.parametrize("path", VALID)
def test_bodies_that_are_too_large(app: Any, path: str) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * (1 << 20)

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON) as http:
            declared = await http.post(path, content=b"{}", headers={"content-length": str(100 << 20)})
            return [declared, await http.post(path, content=chunks())]

    for response in asyncio.run(send()):
        assert response.status_code == 413
        check(response, path)
    assert sent <= 3, "the rest is not read"


def test_token_ids_out_of_range(app: Any) -> None:
    ids = (-1, 420, 2**31, 2**63, 2**70)
    fields = [{"prompt": [i]} for i in ids] + [{"prompt": "x", "stop_token_ids": [i]} for i in ids]
    fields += [{"prompt": "x", "allowed_token_ids": [i]} for i in ids]
    fields += [{"prompt": "x", "logit_bias": {str(i): 1}} for i in ids]
    posts = [("/v1/completions", body) for body in fields] + [("/detokenize", {"tokens": [i]}) for i in ids]

    async def send() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=JSON) as http:
            return [(await http.post(path, json=body)).status_code for path, body in posts]

    assert set(asyncio.run(send())) == {400}


def explore(app: Any, num_examples: int, modes: tuple[GenerationMode, ...]) -> int:
    """Call every POST route that takes a body with such as the document allows, and with such as it forbids."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    number = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.method != "post" or not len(operation.body):
            continue
        for mode in modes:

            @settings(
                max_examples=num_examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                nonlocal number
                number += 1
                response = case.call()
                assert response.status_code < 500, (case.path, case.body, response.text)
                content = httpx.Response(response.status_code, content=response.content)
                check(content, case.path)

            call()
    return number


def test_what_the_document_says(app: Any, client: Any) -> None:
    assert explore(app, 1, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)) >= 16
    assert client.num_running == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_the_document_says(app: Any, client: Any) -> None:
    assert explore(app, 40, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)) > 500
    assert client.num_running == 0
