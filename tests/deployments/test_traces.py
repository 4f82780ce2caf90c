"""The spans of requests over two real engines, as a collector gets them by OTLP; one channel breaks on the way."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.telemetry.tracing import Tracing
from tests.deployments.two_engines import TwoEngines
from tests.limits import run
from tools.otlp_receiver import Receiver, attributes

STORY = {"messages": [{"role": "user", "content": "canaryprompt: count from 1 to 30."}], "model": "tiny-chat"}


@pytest.fixture(scope="module")
def engines() -> Iterator[TwoEngines]:
    engines = TwoEngines()
    yield engines
    engines.shutdown()


def traced(engines: TwoEngines, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[Receiver, Any]:
    """What the collector got of one request, and the answer."""

    async def main(endpoint: str) -> Any:
        await engines.start()
        tracing = Tracing.from_environment({"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
        assert tracing is not None
        app = create_app(engines, RequestLimits())
        app.state.tracing = tracing
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://manta") as http:
                answer = await http.post(path, json=body, headers=headers)
        finally:
            await engines.stop()
            tracing.close()
        return answer

    with Receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        return receiver, run(main(receiver.endpoint))


def children(spans: list[Span], parent: Span) -> list[Span]:
    found = [span for span in spans if span.parent_span_id == parent.span_id]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


def test_the_tree_of_a_request_that_was_continued(engines: TwoEngines) -> None:
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    engines.scissors.cuts = [6]
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01", "authorization": "Bearer sk-canarykey"}
    body = {**STORY, "max_tokens": 20, "temperature": 0, "seed": 3, "min_tokens": 20}
    receiver, answer = traced(engines, "/v1/chat/completions", body, headers)
    assert answer.status_code == 200
    assert {span.trace_id.hex() for span in receiver.spans} == {trace_id}
    (server,) = [span for span in receiver.spans if span.parent_span_id.hex() == parent_id]
    assert (server.name, server.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
    assert attributes(server)["http.response.status_code"] == 200
    assert not [name for name in attributes(server) if name.startswith("gen_ai.")]
    (chat,) = children(receiver.spans, server)
    assert (chat.name, chat.kind) == ("chat tiny-chat", Span.SPAN_KIND_INTERNAL)
    told, usage = attributes(chat), answer.json()["usage"]
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "tiny-chat"
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.request.max_tokens"] == 20
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 20
    assert told["gen_ai.response.time_to_first_chunk"] > 0

    parts = children(receiver.spans, chat)
    assert [part.name for part in parts] == ["route", "queue", "prefill", "decode"] * 2
    replicas = [attributes(part)["manta.replica"] for part in parts]
    first, second = replicas[0], replicas[4]
    assert replicas == [first] * 4 + [second] * 4
    assert {first, second} == {"a", "b"}
    (moved,) = [event for event in chat.events if event.name == "migrated"]
    migrated = attributes(moved)
    assert migrated == {"from": first, "to": second, "tokens": migrated["tokens"], "reason": "lost"}
    assert 0 < migrated["tokens"] <= 20
    assert [event.name for part in parts if part.name == "decode" for event in part.events] == ["first_token"] * 2
    for outer, inner in ((server, [chat]), (chat, parts)):
        for span in inner:
            assert outer.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= outer.end_time_unix_nano
    for before, after in itertools.pairwise(parts):
        assert before.end_time_unix_nano <= after.start_time_unix_nano or before.name == "decode"
    text = answer.json()["choices"][0]["message"]["content"]
    for secret in ("canaryprompt", "canarykey", text[:20]):
        assert secret.encode() not in receiver.raw


def test_choices_and_a_trace_of_our_own(engines: TwoEngines) -> None:
    receiver, answer = traced(
        engines, "/v1/completions", {"prompt": "a b c", "model": "tiny-chat", "n": 2, "max_tokens": 3}, {}
    )
    assert answer.status_code == 200
    (server,) = [span for span in receiver.spans if not span.parent_span_id]
    (model,) = children(receiver.spans, server)
    assert model.name == "text_completion tiny-chat"
    assert attributes(model)["gen_ai.request.choice.count"] == 2
    assert len(children(receiver.spans, model)) == 8
    assert receiver.resources[0]["service.name"] == "manta"


def test_the_client_s_choice_not_to_sample_holds(engines: TwoEngines) -> None:
    headers = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
    receiver, _ = traced(engines, "/v1/completions", {"prompt": "a", "model": "tiny-chat", "max_tokens": 1}, headers)
    assert not receiver.spans


def test_a_refused_request_has_a_server_span_alone(engines: TwoEngines) -> None:
    receiver, answer = traced(engines, "/v1/completions", {"prompt": "a", "model": "nobody"}, {})
    assert answer.status_code == 404
    (server,) = receiver.spans
    assert attributes(server)["http.response.status_code"] == 404
    assert server.status.code == Status.STATUS_CODE_UNSET, "a client's mistake is no error of the server"
    assert json.loads(answer.text)["error"]
