"""/debug/route asks for the place of the tokens that the body stands for, in the caller's own part of the cache."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.server.app import create_app
from app.api.server.debug import debug_routes
from app.config.limits import RequestLimits


class Explaining:
    """A client of engines that notes what it is asked for."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def explain_route(self, *asked: Any) -> dict[str, Any]:
        self.asked.append(asked)
        return {"replica_id": "r0"}


@pytest.fixture
def engines(client: Any) -> Explaining:
    return Explaining(client)


def test_tokens_place_and_session(engines: Explaining) -> None:
    app = create_app(engines, RequestLimits())  # type: ignore[arg-type]
    app.include_router(debug_routes(engines, RequestLimits()))  # type: ignore[arg-type]
    http = TestClient(app)
    body = {"model": "alias", "prompt": "a prompt", "max_tokens": 5, "session": "s"}
    assert http.post("/debug/route", json=body).json() == {"replica_id": "r0"}
    assert http.post("/debug/route", json={**body, "cache_salt": "x"}).status_code == 200
    (model, tokens, root, max_tokens, session), (_, same, salted, *_) = engines.asked
    assert tokens == http.post("/tokenize", json={"model": "m", "prompt": "a prompt"}).json()["tokens"] == same
    assert (model, max_tokens, session) == ("m", 5, "s")
    assert root != salted
    refused = http.post("/debug/route", json={"prompt": ""})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
