"""The streaming client against a server that cuts its bodies in odd places, fails, or answers slowly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.cli.stream_client import Server, StreamResult, run_streams, stream_completion
from app.errors import ConfigError
from tests.cli.fake_server import FakeServer, Script

TEXTS = ["Grüße", ', "quoted"', "\n\ndata: x", " end"]


def stream(server: FakeServer, path: str = "/v1/completions", **body: Any) -> StreamResult:
    return asyncio.run(stream_completion(Server(server.url), body, path))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_text_survives_any_cut(size: int, chunked: bool, path: str) -> None:
    script = Script([0.0] * 4, 9, 5, TEXTS)
    cut = lambda body: [body[i : i + size] for i in range(0, len(body), size)]  # noqa: E731
    with FakeServer([script], pieces=cut, chunked=chunked) as server:
        result = stream(server, path)
    assert result.error is None
    assert result.text == "".join(TEXTS)
    assert (len(result.event_times), result.num_tokens, result.num_prompt_tokens) == (4, 9, 5)
    assert result.begin <= result.event_times[0] <= result.event_times[-1]


def test_what_is_sent() -> None:
    with FakeServer([Script([0.0], 1)]) as server:
        asyncio.run(stream_completion(Server(server.url + "/v1/", "secret"), {"prompt": [1, 2]}))
        seen = server.seen[0]
    assert seen.path == "/v1/completions"
    assert seen.headers["authorization"] == "Bearer secret"
    assert seen.body == {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("cut", "closed the connection before the answer had ended"),
        ("error", "the engine died"),
        ("status", "400 Bad Request: the context is too short"),
    ],
)
def test_failures_are_in_the_result(ending: str, says: str) -> None:
    with FakeServer([Script([0.0], 1, ending=ending)]) as server:
        assert says in (stream(server).error or "")


def test_a_body_that_just_ends_is_a_failure() -> None:
    with FakeServer([Script([0.0], 1, ending="cut")], chunked=False) as server:
        assert stream(server).error == "the stream ended without [DONE]"


def test_no_token_is_a_failure() -> None:
    with FakeServer([Script([], 0)]) as server:
        assert stream(server).error == "the answer held no token"


def test_nobody_there() -> None:
    result = asyncio.run(stream_completion(Server("http://127.0.0.1:9"), {}))
    assert "ConnectionRefusedError" in (result.error or "")


def test_bad_url() -> None:
    with pytest.raises(ConfigError, match="expected something like"):
        Server("localhost:8000")


def test_concurrency_is_bounded() -> None:
    with FakeServer([Script([0.05, 0.0], 2)]) as server:
        results = asyncio.run(run_streams(Server(server.url), [{}] * 6, 2))
    spans = sorted((result.begin, result.event_times[-1]) for result in results)
    for begin, _ in spans:
        assert sum(a <= begin < b for a, b in spans) <= 2
