"""Malformed bodies at the pooling endpoints: a 400 that says why, or an answer; never a 500, never a request left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.pooling.cohere import CohereEmbedRequest, CohereEmbedV1Request
from app.api.pooling.protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.pooling_engines import PoolingEngines
from tests.tiny_encoders import tiny_encoder

BODIES: dict[str, Any] = {
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": PoolingRequest,
    "/v2/embed": CohereEmbedRequest,
    "/v1/embed": CohereEmbedV1Request,
    "/classify": ClassifyRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
}
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-2, 9), st.floats(), st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=5,
)
GOOD = {
    "input": "a fox",
    "texts": ["a fox"],
    "input_type": "search_query",
    "text_1": "a",
    "text_2": ["b", "c"],
    "query": "a",
    "documents": ["b", "c"],
}


@pytest.fixture(scope="module")
def engines() -> Iterator[PoolingEngines]:
    engines = PoolingEngines({"embed": tiny_encoder("bert"), "cross": tiny_encoder("bert", 1)})
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def app(engines: PoolingEngines) -> Any:
    return create_app(engines, RequestLimits(max_prompts=64))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_answer_is_an_answer_or_a_refusal(app: Any, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(BODIES)))
    names = sorted(BODIES[path].model_fields)
    good = {name: value for name, value in GOOD.items() if name in names and data.draw(st.booleans())}
    model = data.draw(st.sampled_from(["embed", "cross"]))
    odd = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=2))
    answer = asyncio.run(_post(app, path, {"model": model, **good, **odd}))
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


async def _post(app: Any, path: str, body: Any) -> httpx.Response:
    json_type = {"content-type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post(path, content=json.dumps(body).encode(), headers=json_type)


def test_a_client_that_leaves_is_forgotten(app: Any, engines: PoolingEngines) -> None:
    """Its requests are aborted, and the engine goes on."""

    async def leave() -> None:
        texts = [f"{i} fox " * 20 for i in range(64)]
        body = json.dumps({"model": "embed", "input": texts}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/embeddings", "raw_path": b"/v1/embeddings",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"", "http_version": "1.1", "scheme": "http", "client": None, "server": None,
        }  # fmt: skip
        await app(scope, receive, send)
        assert sent[0]["status"] == 499

    asyncio.run(leave())
    engines.wait_idle()
    assert asyncio.run(_post(app, "/v1/embeddings", {"model": "embed", "input": "a"})).status_code == 200
