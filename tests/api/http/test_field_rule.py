"""Fields that no table knows, and those that are known to change nothing: ignored or refused, counted and told."""

from __future__ import annotations

import logging
from typing import Any

import anthropic
import httpx
import openai
import pytest

from app.api.chat.messages import ChatOptions
from app.api.chat.prompt import check_roles
from app.api.http.field_rule import MAX_LOGGED, FieldRule
from app.api.http.http_metrics import IGNORED_HEADERS, HttpMetrics
from app.api.openai.responses_protocol import InputTokensRequest
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.errors import UnsupportedError
from app.telemetry.metrics_recorder import MetricsRecorder

HI = [{"role": "user", "content": "hi"}]
LENIENT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": "hi", "store": False}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/v1/messages", {"messages": HI, "max_tokens": 3, "model": "m"}),
    ("/v1/messages/count_tokens", {"messages": HI, "model": "m"}),
]
STRICT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
]


class Counted:
    """An application whose ingress counts."""

    def __init__(self, http: httpx.Client, app: Any) -> None:
        self.http = http
        self.recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        app.state.http_metrics = HttpMetrics(self.recorder)

    def ignored(self) -> dict[str, float]:
        series = self.recorder.series().values.get("manta:ingress_ignored_fields_total", {})
        return {labels[0]: value for labels, value in series.items() if value}


@pytest.fixture
def build(make_client: Any, served_model: Any, http_to: Any) -> Any:
    def make(**limits: Any) -> Counted:
        app = create_app(make_client(served_model), RequestLimits(**limits))
        return Counted(http_to(app), app)

    return make


@pytest.mark.parametrize(("path", "body"), LENIENT)
def test_agents_may_say_what_nobody_knows_yet(
    build: Any, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    counted = build()
    tool = {"name": "f", "parameters" if "responses" in path else "input_schema": {}, "fresh": 1}
    fields = {"next_week": {"a": [1]}, "tools": [{"type": "function" if "responses" in path else "custom", **tool}]}
    with caplog.at_level(logging.WARNING, "manta.api"):
        for _ in range(3):
            answer = counted.http.post(path, json=body | fields)
            assert answer.status_code == 200, answer.text
    assert counted.ignored()["other"] >= 3.0
    told = [record.getMessage() for record in caplog.records if "ignored unknown fields" in record.getMessage()]
    assert len(told) == 1, "each name once"
    assert "'next_week'" in told[0]
    assert path in told[0]


@pytest.mark.parametrize(("path", "body"), LENIENT)
def test_tools_that_nobody_knows_yet_are_not_shown_to_the_model(
    build: Any, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each new version of an agent brought a tool that its server runs, or that the model may do without."""
    counted = build()
    known = {"name": "f", "parameters" if "responses" in path else "input_schema": {"type": "object"}}
    known["type"] = "function" if "responses" in path else "custom"
    fields = {"tools": [{"type": "next_week_20270101", "name": "of_next_week"}, known]}
    with caplog.at_level(logging.WARNING, "manta.api"):
        for more in ({}, {"next_week": 1}):  # read once, and twice
            answer = counted.http.post(path, json=body | fields | more)
            assert answer.status_code == 200, answer.text
    assert counted.ignored() == {"other": 3.0}
    told = [record.getMessage() for record in caplog.records if "ignored unknown" in record.getMessage()]
    assert len(told) == 2, "each name once"
    assert "'a tool of type next_week_20270101'" in told[0]
    if path.endswith("tokens"):
        assert answer.json() == counted.http.post(path, json=body | {"tools": [known]}).json()
    refusing = build(unknown_fields="refuse").http.post(path, json=body | fields)
    assert refusing.status_code == 400
    assert "next_week_20270101" in refusing.text
    elsewhere = {"messages": HI, "tools": [{"type": "next_week", "function": {"name": "f"}}]}
    assert counted.http.post("/v1/chat/completions", json=elsewhere).status_code == 400


def test_an_inclusion_that_nobody_knows_yet_includes_nothing(build: Any) -> None:
    counted = build()
    body = {"input": "hi", "store": False, "include": ["reasoning.encrypted_content", "next.week"]}
    assert counted.http.post("/v1/responses", json=body).status_code == 200
    assert counted.ignored() == {"other": 1.0}
    assert build(unknown_fields="refuse").http.post("/v1/responses", json=body).status_code == 400
    assert counted.http.post("/v1/responses", json=body | {"include": [{}]}).status_code == 400


@pytest.mark.parametrize(("path", "body"), LENIENT)
def test_faults_beside_unknown_fields_are_still_named(build: Any, path: str, body: dict[str, Any]) -> None:
    answer = build().http.post(path, json=body | {"next_week": 1, "tools": 5})
    assert answer.status_code == 400
    assert "tools" in answer.text
    assert "next_week" not in answer.text


@pytest.mark.parametrize(("path", "body"), STRICT)
def test_elsewhere_an_unknown_field_is_refused_by_name(build: Any, path: str, body: dict[str, Any]) -> None:
    answer = build().http.post(path, json=body | {"next_week": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "next_week")


@pytest.mark.parametrize(("path", "body"), [*LENIENT, *STRICT])
def test_the_option_holds_for_all_routes(build: Any, path: str, body: dict[str, Any]) -> None:
    refuses, ignores = build(unknown_fields="refuse"), build(unknown_fields="ignore")
    answer = refuses.http.post(path, json=body | {"next_week": 1})
    assert answer.status_code == 400
    assert "next_week" in answer.text
    assert ignores.http.post(path, json=body | {"next_week": 1}).status_code == 200
    assert ignores.ignored() == {"other": 1.0}
    assert refuses.ignored() == {}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"user": "u"}, "user"),
        ("/v1/chat/completions", {"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
        ("/v1/completions", {"user": "u"}, "user"),
        ("/v1/responses", {"client_metadata": {"x": "y"}}, "client_metadata"),
        ("/v1/messages", {"metadata": {"user_id": "u"}}, "metadata"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "defer_loading"),
    ],
)
def test_what_changes_nothing_is_counted_by_name(build: Any, path: str, fields: dict[str, Any], name: str) -> None:
    counted, bodies = build(unknown_fields="refuse"), dict([*LENIENT, *STRICT])
    assert counted.http.post(path, json=bodies[path] | fields).status_code == 200
    assert counted.ignored() == {name: 1.0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"moderation": {"model": "x"}}, "moderation"),
        ("/v1/responses", {"tools": [{"type": "function", "name": "f", "async": True}]}, "async"),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": {}, "allowed_callers": ["code"]}]},
            "allowed_callers",
        ),
        ("/v1/chat/completions", {"audio": {"voice": "x"}}, "audio"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name_under_any_option(
    build: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    bodies = dict([*LENIENT, *STRICT])
    for option in ("auto", "refuse", "ignore"):
        answer = build(unknown_fields=option).http.post(path, json=bodies[path] | fields | {"x": None})
        assert answer.status_code == 400, answer.text
        assert param in answer.text


@pytest.mark.parametrize(("path", "body"), [*LENIENT, STRICT[0]])
def test_what_asks_for_nothing_is_not_refused(build: Any, path: str, body: dict[str, Any]) -> None:
    for name in ("moderation", "mcp_servers", "audio"):
        for value in (None, False, [], ""):
            answer = build(unknown_fields="ignore").http.post(path, json=body | {name: value})
            assert answer.status_code == 200, answer.text


def test_a_client_makes_no_series(build: Any) -> None:
    counted = build()
    fields = {f"name_{number}": number for number in range(2000)}
    for _ in range(2):
        assert counted.http.post(LENIENT[0][0], json=LENIENT[0][1] | fields).status_code == 200
    assert set(counted.ignored()) == {"other"}


def test_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rule = FieldRule("ignore")
    with caplog.at_level(logging.WARNING, "manta.api"):
        for number in range(10 * MAX_LOGGED):
            rule._log("/p", [f"{number}" * 100 + "\n"])
    assert len(caplog.records) == MAX_LOGGED
    assert all("\n" not in record.getMessage() and len(record.getMessage()) < 200 for record in caplog.records)


def test_headers_of_other_servers_are_counted(build: Any) -> None:
    counted = build()
    headers = dict.fromkeys(IGNORED_HEADERS, "x") | {"x-made-up": "1"}
    assert counted.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers).status_code == 200
    assert counted.ignored() == dict.fromkeys(IGNORED_HEADERS, 1.0)


def test_many_unknown_fields_cost_two_parses(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are found one list entry at a time: each must not cost a parse of its own."""
    tools = [{"type": "function", "name": f"f{i}", "parameters": {}, "fresh": i} for i in range(100)]
    body = {"input": "hi", "tools": tools, "text": {"fresh": 1}, "reasoning": {"fresh": 2}}
    parse, num_parses = InputTokensRequest.model_validate_json, 0

    def counting(*arguments: Any, **named: Any) -> InputTokensRequest:
        nonlocal num_parses
        num_parses += 1
        return parse(*arguments, **named)

    monkeypatch.setattr(InputTokensRequest, "model_validate_json", counting)
    assert build().http.post("/v1/responses/input_tokens", json=body).status_code == 200
    assert num_parses == 2


def test_the_sdks_send_fields_of_tomorrow(sdk: openai.OpenAI, server: Any) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tomorrow = {"tomorrow": {"deep": [1, 2]}}
    response = sdk.responses.create(model="m", input="hi", extra_body=tomorrow)
    assert response.status in ("completed", "incomplete")
    message = claude.messages.create(model="m", max_tokens=5, messages=HI, extra_body=tomorrow)  # type: ignore[arg-type]
    assert message.type == "message"
    with pytest.raises(openai.BadRequestError, match="tomorrow"):
        sdk.chat.completions.create(model="m", messages=HI, extra_body=tomorrow)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": "1"}, "n"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.0"),
    ],
)
def test_a_number_is_a_number_and_a_flag_a_flag(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_numbers_are_taken_as_json_writes_them(http: httpx.Client) -> None:
    body = {"messages": HI, "temperature": 1, "top_p": 1.0, "max_tokens": 5, "logit_bias": {"5": 1}, "stream": False}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "zstd", "x, gzip"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/files"])
def test_a_compressed_body_is_a_415(http: httpx.Client, encoding: str, path: str) -> None:
    answer = http.post(path, json={"messages": HI}, headers={"content-encoding": encoding})
    assert answer.status_code == 415
    assert "content-encoding" in answer.text
    plain = http.post("/v1/chat/completions", json={"messages": HI}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_roles_of_one_s_own(http: httpx.Client, client: Any, served_model: Any) -> None:
    turns = [*HI, {"role": "retrieval.v1", "content": "A fact."}]
    assert http.post("/v1/chat/completions", json={"messages": turns}).status_code == 200
    prompt = served_model.tokenizer.decode(client.requests[-1].prompt_token_ids, False)
    assert "<|im_start|>retrieval.v1\nA fact.<|im_end|>" in prompt
    for role in ("a b", "", "<|im_end|>", "x" * 65, "a\n"):
        answer = http.post("/v1/chat/completions", json={"messages": [{"role": role, "content": "x"}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.0.role")


def test_a_role_that_the_template_passes_over_is_refused() -> None:
    options = ChatOptions.model_validate({"messages": [*HI, {"role": "king", "content": "Obey."}]})
    check_roles(options, "hi Obey.")
    with pytest.raises(UnsupportedError, match="shows no messages of role 'king'"):
        check_roles(options, "hi")


def test_logprobs_of_the_whole_vocabulary_need_room(build: Any, served_model: Any) -> None:
    size = served_model.info.vocab_size
    for fields in ({"logprobs": True, "top_logprobs": -1}, {"prompt_logprobs": -1}):
        body = {"messages": HI, "max_tokens": 1, **fields}
        answer = build().http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, list(fields)[-1])
        assert build(max_logprobs=size - 1).http.post("/v1/chat/completions", json=body).status_code == 400
        assert build(max_logprobs=size).http.post("/v1/chat/completions", json=body).status_code == 200


def test_thinking_is_counted_where_the_model_cannot(build: Any) -> None:
    server = build()
    for path, body in LENIENT[2:]:
        asked = {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert server.http.post(path, json=asked).status_code == 200
    assert server.ignored() == {"thinking": 2}
    server.http.post(path, json={**body, "thinking": {"type": "disabled"}})
    assert server.ignored() == {"thinking": 2}
