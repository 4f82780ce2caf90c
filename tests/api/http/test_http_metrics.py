"""HTTP requests as metrics, under the names and labels of prometheus-fastapi-instrumentator."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.http.http_metrics import HttpMetrics
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.telemetry.metrics_recorder import MetricsRecorder


@pytest.fixture
def recorder() -> MetricsRecorder:
    return MetricsRecorder({"ingress": "i"}, scope="ingress")


@pytest.fixture
def http(client: Any, recorder: MetricsRecorder) -> TestClient:
    app = create_app(client, RequestLimits())
    app.state.http_metrics = HttpMetrics(recorder)
    return TestClient(app)


def test_requests_by_route_method_and_status(http: TestClient, recorder: MetricsRecorder) -> None:
    http.get("/version")
    http.get("/v1/models")
    http.get("/v1/models/nobody-has-this")
    http.post("/v1/completions", json={"prompt": "a", "nonsense": 1})
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"idempotency-key": "k"})
    for secret in ("/sk-1234", "/v1/sk-1234"):
        http.get(secret)
    http.request("BREW", "/version")
    http.get("/health")
    assert recorder.series().values["http_requests_total"] == {
        ("/version", "GET", "2xx"): 1,
        ("/v1/models", "GET", "2xx"): 1,
        ("/v1/models/{model_id:path}", "GET", "4xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/completions", "POST", "2xx"): 1,
        ("none", "GET", "4xx"): 2,
        ("/version", "other", "4xx"): 1,
    }
    times = recorder.series().histograms["http_request_duration_seconds"]
    assert sum(histogram.count for histogram in times.values()) == 8
