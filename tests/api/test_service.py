"""/health, /metrics, /version, /docs."""

from __future__ import annotations

from typing import Any

import httpx


def test_health(http: httpx.Client, client: Any) -> None:
    assert http.get("/health").status_code == 200
    client.healthy = False
    sick = http.get("/health")
    assert sick.status_code == 503
    assert sick.json()["error"]["code"] == "engine_unavailable"


def test_metrics_and_version(http: httpx.Client) -> None:
    metrics = http.get("/metrics")
    assert metrics.text == "vllm:num_requests_running 0\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert http.get("/version").json()["version"]


def test_docs_describe_every_body(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["properties"]
    described = schemas["ChatRequest"]["properties"]
    assert {"messages", "temperature", "tools", "min_p"} <= set(described)
    assert all("description" in field for field in described.values())
    assert "generation_config.json" in document["info"]["description"]
    references = {part.split('"')[0] for part in str(document).replace("'", '"').split("#/components/schemas/")[1:]}
    assert references <= set(schemas)
