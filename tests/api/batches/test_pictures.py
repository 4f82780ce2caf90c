"""Batches and kept answers of requests with pictures: each line shows its own, and what is wrong with one is its line's
error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.media import media_of
from tests import limits
from tests.api.conftest import ScriptedClient, Server
from tests.api.picture_table import BROKEN, ONE, SHOWING, url_of
from tests.media.media_model import reader, seeing, write_media_model

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
URLS = [ONE, url_of(84, 56), url_of(112, 28)]
GRIDS = [(1, 6, 4), (1, 4, 6), (1, 2, 8)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    own = reader()
    client = ScriptedClient(seeing(write_media_model(tmp_path_factory.mktemp("pictures") / "m"), own))
    client.script = lambda request: [40, 41]
    yield client
    own.close()


@pytest.fixture(scope="module")
def app(client: ScriptedClient) -> Any:
    return create_app(client, RequestLimits())


@pytest.fixture(scope="module")
def server(app: Any) -> Iterator[Server]:
    with Server(app) as server:
        yield server


def sdk_options() -> dict[str, Any]:
    return {"api_key": "none", "max_retries": 0, "timeout": limits.patience_s()}


def shown(client: ScriptedClient) -> set[tuple[int, int, int]]:
    """The grids of all pictures since the last call."""
    asks = [media_of(request.asks) for request in client.requests]
    found = {item.grid for ask in asks if ask is not None for item in ask.items}
    client.requests.clear()
    return found


def test_lines_of_a_batch(client: ScriptedClient, server: Server, app: Any) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", **sdk_options())
    bodies = [SHOWING[CHAT][0]([url]) for url in [*URLS, BROKEN]]
    lines = [{"custom_id": str(i), "method": "POST", "url": CHAT, "body": body} for i, body in enumerate(bodies)]
    file = sdk.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    limits.wait_until(lambda: sdk.batches.retrieve(batch.id).status == "completed", "the batch")
    done = sdk.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
    assert done.error_file_id is not None
    (error,) = map(json.loads, sdk.files.content(done.error_file_id).text.splitlines())
    assert error["response"]["body"]["error"]["param"] == "messages.0.content.0.image_url"
    assert shown(client) == set(GRIDS)
    limits.wait_until(lambda: app.state.held.total == 0, "all memory is given back")


def test_requests_of_a_message_batch(client: ScriptedClient, server: Server) -> None:
    claude = anthropic.Anthropic(base_url=server.url, **sdk_options())
    params: list[Any] = [SHOWING[MESSAGES][0]([url]) for url in [*URLS, BROKEN]]
    made = claude.messages.batches.create(requests=[{"custom_id": str(i), "params": p} for i, p in enumerate(params)])
    limits.wait_until(lambda: claude.messages.batches.retrieve(made.id).processing_status == "ended", "the batch")
    found: dict[str, Any] = {line.custom_id: line.result for line in claude.messages.batches.results(made.id)}
    assert [found[str(i)].type for i in range(4)] == ["succeeded"] * 3 + ["errored"]
    assert found["3"].error.error.message.startswith("messages.0.content.0.source")
    assert shown(client) == set(GRIDS)


def test_an_answer_that_is_kept_is_computed_once(client: ScriptedClient, server: Server, app: Any) -> None:
    """Another picture under the same key is another request."""
    with httpx.Client(base_url=server.url, timeout=limits.patience_s()) as http:
        for number, path in enumerate((CHAT, "/v1/responses", MESSAGES)):
            headers = {"Idempotency-Key": f"picture-{number}"}
            first, again = (http.post(path, json=SHOWING[path][0](URLS[:1]), headers=headers) for _ in range(2))
            assert (first.status_code, again.status_code) == (200, 200), first.text
            assert first.json() == again.json()
            assert again.headers["idempotent-replayed"] == "true"
            assert shown(client) == {GRIDS[0]}
            other = http.post(path, json=SHOWING[path][0](URLS[1:2]), headers=headers)
            assert other.status_code in (400, 409, 422), other.text
            assert not client.requests
    limits.wait_until(lambda: app.state.held.total == 0, "all memory is given back")
