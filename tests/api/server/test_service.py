"""/health, /ping, /load, /metrics, /version, /tokenizer_info, /server_info, /docs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.api.http.auth import ApiKeys
from app.api.server.app import create_app
from app.api.server.server_info import server_info_routes
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.config.serve import ServeConfig


def test_health(http: httpx.Client, client: Any) -> None:
    assert http.get("/health").status_code == 200
    client.healthy = False
    sick = http.get("/health")
    assert sick.status_code == 503
    assert sick.json()["error"]["code"] == "engine_unavailable"
    assert [http.request(method, "/ping").status_code for method in ("GET", "POST")] == [503, 503]
    client.healthy = True
    assert http.post("/ping").json() == {"status": "ok"}


def test_load(http: httpx.Client, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "# HELP vllm:num_requests_running Requests that run.",
        'vllm:num_requests_running{engine="0"} 3',
        'vllm:num_requests_running{engine="1"} 2.0',
        'vllm:num_requests_waiting{engine="0"} 4',
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 4',
    )

    async def metrics() -> str:
        return "\n".join(lines)

    monkeypatch.setattr(client, "metrics_text", metrics)
    assert http.get("/load").json() == {"server_load": 9}


def test_what_is_told_only_on_request(client: Any, http: httpx.Client) -> None:
    assert {http.get(path).status_code for path in ("/tokenizer_info", "/server_info")} == {404}
    hidden = "sha256:" + "0" * 64
    ingress = IngressConfig(tokenizer_info=True, api_key_hashes=(hidden,))
    app = create_app(client, RequestLimits(), ingress, keys=ApiKeys())
    app.include_router(
        server_info_routes(ServeConfig(models=[{"name": "m", "engine": {"model": "x"}}], ingress=ingress))
    )
    told = TestClient(app)
    answer = told.get("/tokenizer_info", params={"model": "alias"}).json()
    assert answer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "<|im_start|>" in answer["chat_template"]
    assert told.get("/tokenizer_info", params={"model": "nobody"}).status_code == 404
    info = told.get("/server_info")
    assert info.json()["config"]["ingress"]["tokenizer_info"] is True
    assert hidden not in info.text


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
