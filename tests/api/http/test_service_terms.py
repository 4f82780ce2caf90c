"""Class, deadline and retries of a request: from headers, bodies and keys, over HTTP and from the real SDKs."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.admission import AdmissionConfig, TenantConfig
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import OverloadedError, ServerOverloadedError
from app.records.outputs import EngineOutput
from app.records.request import Placement
from tests import limits

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
    ("/v1/responses", {"input": "hi", "store": False}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3, "model": "m"}),
]


def placement(http: httpx.Client, client: Any, body: dict[str, Any], path: str = CHAT, **headers: str) -> Placement:
    response = http.post(path, json=body, headers={name.replace("_", "-"): text for name, text in headers.items()})
    assert response.status_code == 200, response.text
    found: Placement = client.requests[-1].placement
    return found


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_dialect_carries_the_deadline(http: httpx.Client, client: Any, path: str, body: dict[str, Any]) -> None:
    deadline = placement(http, client, body, path, x_request_timeout_ms="60000", x_stainless_read_timeout="5").deadline
    assert deadline is not None
    assert 0 < deadline.timeout_s <= 60.0, "counted from when the request came"
    assert not deadline.until_first_token
    stream = {**body, "stream": True}
    assert placement(http, client, stream, path, x_stainless_read_timeout="5.0").deadline.until_first_token  # type: ignore[union-attr]
    for headers in ({}, {"x_stainless_read_timeout": "inf"}, {"x_stainless_read_timeout": "1e9"}):
        assert placement(http, client, body, path, **headers).deadline is None


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("header", "text"),
    [
        *(("x-request-timeout-ms", text) for text in ("", "soon", "0", "-1", "nan", "inf", "1e99", "9" * 400)),
        *(("x-stainless-read-timeout", text) for text in ("soon", "-1", "nan")),
        *(("x-stainless-retry-count", text) for text in ("-1", "1.5", "many", "9" * 20)),
    ],
)
def test_a_header_that_is_none_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], header: str, text: str
) -> None:
    response = http.post(path, json=body, headers={header: text})
    assert response.status_code == 400
    assert header in response.text


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("header", ["x-stainless-timeout", "x-stainless-read-timeout", "x-stainless-retry-count"])
def test_headers_that_the_client_did_not_mean_are_ignored(
    http: httpx.Client, client: Any, path: str, body: dict[str, Any], header: str
) -> None:
    for text in ("NOT_GIVEN", "None", "", "null", "undefined", "<anthropic.Omit object at 0x7f>"):
        made = placement(http, client, body, path, **{header: text})
        assert made.deadline is None
        assert made.service_class.name == "default"


@pytest.mark.parametrize(
    ("tier", "expected"),
    [(None, "default"), ("auto", "default"), ("default", "default"), ("priority", "interactive"), ("flex", "bulk")],
)
def test_the_tier_chooses_the_class(http: httpx.Client, client: Any, tier: str | None, expected: str) -> None:
    assert placement(http, client, {"messages": HI, "service_tier": tier}).service_class.name == expected
    assert (
        placement(http, client, {"input": "hi", "service_tier": tier}, "/v1/responses").service_class.name == expected
    )


@pytest.mark.parametrize(("tier", "expected"), [(None, "default"), ("priority", "priority"), ("flex", "flex")])
def test_a_response_says_which_tier_served_it(http: httpx.Client, tier: str | None, expected: str) -> None:
    body = {"input": "hi", "service_tier": tier, "max_output_tokens": 3, "model": "m"}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["service_tier"] == expected


def test_anthropics_tiers(http: httpx.Client, client: Any) -> None:
    body = {"messages": HI, "max_tokens": 3, "model": "m"}
    for tier in ("auto", "standard_only"):
        assert placement(http, client, body | {"service_tier": tier}, "/v1/messages").service_class.name == "default"
    assert http.post("/v1/messages", json=body | {"service_tier": "flex"}).status_code == 400
    assert http.post(CHAT, json={"messages": HI, "service_tier": "gold"}).status_code == 400


def test_a_tenant_gets_no_better_class_than_it_may(make_client: Any, served_model: Any, http_to: Any) -> None:
    tenants = {
        "gold": TenantConfig(service_class="interactive"),
        "tin": TenantConfig(service_class="bulk", best_class="default"),
    }
    config = AdmissionConfig.model_validate({"tenants": tenants, "default_timeout_s": 30.0})
    keys = ApiKeys(ApiKey.parse(f"{name}={name}-key-123", "test") for name in ("gold", "tin", "other"))
    client = make_client(served_model)
    http = http_to(create_app(client, RequestLimits(), IngressConfig(), keys, admission=config))
    got = {}
    for name in ("gold", "tin", "other"):
        for tier in ("auto", "priority"):
            body = {"messages": HI, "service_tier": tier}
            made = placement(http, client, body, authorization=f"Bearer {name}-key-123")
            got[name, tier] = made.service_class.name
            assert made.deadline is not None, "the configuration's"
    assert got == {
        ("gold", "auto"): "interactive",
        ("gold", "priority"): "interactive",
        ("tin", "auto"): "bulk",
        ("tin", "priority"): "default",
        ("other", "auto"): "default",
        ("other", "priority"): "interactive",
    }


def test_the_sdks_wait_as_long_as_they_are_told_and_say_that_they_come_again(client: Any, server: Any) -> None:
    """Refused once, each comes again after `retry-after-ms`, with its count of retries."""
    sdks: list[Any] = [
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=1, timeout=limits.patience_s()),
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=1, timeout=limits.patience_s()),
    ]
    for sdk in sdks:
        for error in (OverloadedError("full", retry_after_s=0.05), ServerOverloadedError("full", retry_after_s=0.05)):
            before = len(client.requests)
            client.fail_once = error
            ask = sdk.chat.completions if isinstance(sdk, openai.OpenAI) else sdk.messages
            ask.create(model="m", messages=HI, max_tokens=3)
            first, second = client.requests[before:]
            assert (first.placement.num_retries, second.placement.num_retries) == (0, 1)
            assert second.placement.deadline is not None, "the SDK's own timeout"


@pytest.mark.parametrize("kind", [OverloadedError, ServerOverloadedError])
def test_the_headers_say_when_to_come_again(http: httpx.Client, client: Any, kind: type[OverloadedError]) -> None:
    client.fail_after = (0, kind("full", retry_after_s=2.3))
    response = http.post(CHAT, json={"messages": HI})
    assert response.status_code == kind.status
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2300")
    sdk = openai.OpenAI(api_key="none")
    assert sdk._parse_retry_after_header(response.headers) == pytest.approx(2.3)
    assert response.json()["error"]["code"] == kind.code


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passes_is_an_error_that_says_so(http: httpx.Client, client: Any, stream: bool) -> None:
    late = EngineOutput("r", [], finish_reason="error", error="the request got no token", is_late=True)
    client.fail_after = (0, late.as_error())
    response = http.post(CHAT, json={"messages": HI, "stream": stream})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline"
    client.fail_after = (2, late.as_error())
    with http.stream("POST", CHAT, json={"messages": HI, "stream": True}) as streamed:
        assert '"code": "deadline"' in "".join(streamed.iter_text())


def test_what_runs_without_its_client_is_bulk_work(http: httpx.Client, client: Any, wait_for: Any) -> None:
    response = http.post(
        "/v1/responses", json={"input": "hi", "background": True}, headers={"x-stainless-read-timeout": "600"}
    )
    assert response.status_code == 200, response.text
    wait_for(lambda: client.requests)
    made = client.requests[-1].placement
    assert (made.service_class.name, made.deadline) == ("bulk", None)
