"""/live, /ready, /metrics/targets and the pages of single replicas; what of them needs no key."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.api.server.fleet import fleet_routes
from app.config.limits import RequestLimits


class FleetOf:
    """Two replicas over a client of one engine."""

    why: str | None = None

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def why_not_ready(self) -> str | None:
        return self.why

    async def replica_names(self) -> list[str]:
        return ["engine:org/model:0", "ingress:ab12"]

    async def replica_metrics(self, name: str) -> str | None:
        return f"one_metric 1\n# {name}\n" if name in await self.replica_names() else None


@pytest.fixture
def fleet(client: Any) -> FleetOf:
    return FleetOf(client)


@pytest.fixture
def http(fleet: FleetOf) -> TestClient:
    key = ApiKey.parse("acme=a-long-key", "here")
    app = create_app(fleet, RequestLimits(), keys=ApiKeys([key]))
    app.include_router(fleet_routes(fleet))
    return TestClient(app)


def test_ready_and_live_are_told_apart(http: TestClient, fleet: FleetOf) -> None:
    assert http.get("/ready").json() == {"status": "ready"}
    fleet.why = "this ingress replica is being taken out of service"
    refused = http.get("/ready")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == fleet.why
    assert refused.json()["error"]["code"] == "not_ready"
    assert http.get("/live").status_code == 200


def test_targets_lead_to_the_replicas(http: TestClient) -> None:
    """In the form of Prometheus' http_sd: an address, and labels that say where on it."""
    assert http.get("/metrics/targets").status_code == 401
    key = {"authorization": "Bearer a-long-key", "host": "balancer:8000"}
    targets = http.get("/metrics/targets", headers=key).json()
    assert [target["targets"] for target in targets] == [["balancer:8000"]] * 2
    assert len({target["labels"]["instance"] for target in targets}) == 2
    for target in targets:
        page = http.get(target["labels"]["__metrics_path__"], headers=key)
        assert page.status_code == 200
        assert target["labels"]["instance"] in page.text
    assert http.get("/metrics/replicas/engine:gone:0", headers=key).status_code == 404
