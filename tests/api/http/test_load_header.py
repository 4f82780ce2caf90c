"""The load of the engines in the answer's header, for gateways that ask in one of ORCA's forms."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits

LOAD = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0, "num_requests_running": 2.0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.fixture
def http(make_client: Any, served_model: Any, http_to: Any) -> httpx.Client:
    app = create_app(make_client(served_model), RequestLimits())
    app.state.engine_load = lambda: LOAD
    client: httpx.Client = http_to(app)
    return client


def ask(http: httpx.Client, form: str | None, path: str = "/v1/chat/completions", **fields: Any) -> str | None:
    headers = {} if form is None else {"endpoint-load-metrics-format": form}
    answer = http.post(path, json={**CHAT, **fields}, headers=headers)
    return answer.headers.get("endpoint-load-metrics")


@pytest.mark.parametrize("form", ["TEXT", "text"])
def test_text(http: httpx.Client, form: str) -> None:
    kind, _, figures = str(ask(http, form)).partition(" ")
    pairs = dict(pair.split("=") for pair in figures.split(", "))
    assert kind == "TEXT"
    assert {name: float(value) for name, value in pairs.items()} == {f"named_metrics.{k}": v for k, v in LOAD.items()}


@pytest.mark.parametrize("form", ["JSON", "Json"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_json(http: httpx.Client, form: str, path: str, stream: bool) -> None:
    kind, _, figures = str(ask(http, form, path, stream=stream)).partition(" ")
    assert (kind, json.loads(figures)) == ("JSON", {"named_metrics": LOAD})


@pytest.mark.parametrize("form", [None, "", "BIN", "TEXT, JSON", "x" * 1000])
def test_other_formats_get_none(http: httpx.Client, form: str | None) -> None:
    assert ask(http, form) is None


def test_a_refusal_tells_too_and_routes_that_need_no_key_do_not(http: httpx.Client) -> None:
    assert ask(http, "JSON", max_tokens=-5) is not None
    assert "endpoint-load-metrics" not in http.get("/health", headers={"endpoint-load-metrics-format": "JSON"}).headers


def test_where_nobody_measures_there_is_none(make_client: Any, served_model: Any, http_to: Any) -> None:
    assert ask(http_to(create_app(make_client(served_model), RequestLimits())), "JSON") is None


def test_the_sdk_reads_it(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        raw = sdk.chat.completions.with_raw_response.create(
            **CHAT,  # type: ignore[arg-type]
            extra_headers={"endpoint-load-metrics-format": "JSON"},
        )
    assert raw.headers["endpoint-load-metrics"].startswith("JSON {")
