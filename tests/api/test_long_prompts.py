"""Prompts far over the context are refused before they are tokenised whole, on every route; a neighbour goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.records.pooling_info import PoolingInfo
from app.text.tokenizer import Tokenizer
from tests.api.json_routes import TEXT_BODIES, assert_complete, bodies

JSON = {"content-type": "application/json"}
EMBEDS = PoolingInfo("last", True, ("embed", "token_embed"), embedding_size=8)
CLASSIFIES = PoolingInfo("last", True, ("classify",), labels=("a", "b"))


@pytest.fixture
def three_models(served_model: Any, make_client: Any) -> Any:
    models = [
        dataclasses.replace(served_model, name="m"),
        dataclasses.replace(served_model, name="embed", aliases=(), pooling=EMBEDS),
        dataclasses.replace(served_model, name="classify", aliases=(), pooling=CLASSIFIES),
    ]
    return make_client(*models)


@pytest.fixture
def app(three_models: Any) -> Any:
    return create_app(three_models, RequestLimits())


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that is tokenised."""
    lengths: list[int] = []
    for name in ("encode_batch", "encode_plain"):
        original = getattr(Tokenizer, name)

        def recording(self: Tokenizer, texts: Any, *args: Any, original: Any = original) -> Any:
            lengths.extend(map(len, texts))
            return original(self, texts, *args)

        monkeypatch.setattr(Tokenizer, name, recording)
    return lengths


def post(app: Any, path: str, body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, content=json.dumps(body).encode(), headers=JSON)

    return asyncio.run(send())


def test_every_route_is_tested(app: Any) -> None:
    assert_complete(app)


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_a_hopeless_prompt_is_not_tokenised(app: Any, tokenised: list[int], path: str) -> None:
    """512 tokens of context, a megabyte of text."""
    for body in bodies(path, "The quick brown fox, " * 50_000):
        tokenised.clear()
        answer = post(app, path, body)
        assert answer.status_code == 400, (body.keys(), answer.text[:300])
        message = answer.json()["error"]["message"]
        assert "characters" in message, message
        assert sum(tokenised) < 10_000, (body.keys(), message)


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_all_texts_of_a_body_together_are_bounded(three_models: Any, tokenised: list[int], path: str) -> None:
    app = create_app(three_models, RequestLimits(max_prompt_chars=1000))
    for body in bodies(path, "".join(map(str, range(500)))):
        answer = post(app, path, body)
        assert answer.status_code == 400
        assert "at most 1000" in answer.json()["error"]["message"]
    assert sum(tokenised) == 0
