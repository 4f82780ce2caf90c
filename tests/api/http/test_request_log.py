"""The line of each request, as text and as JSON; what clients send and get is in no line of any logger."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from ray._common.formatters import JSONFormatter
from starlette.testclient import TestClient

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.errors import EngineDeadError
from app.telemetry.logging import FORMAT, JsonFormatter
from app.telemetry.request_record import CURRENT, GenerationRecord, Leg

PROMPT, KEY = "zanzibarium", "sk-quetzalcoatl-1234"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def logs() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """What every logger of the process says at every level, as text and as JSON."""
    texts, lines, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers = [logging.StreamHandler(texts), logging.StreamHandler(lines)]
    handlers[0].setFormatter(logging.Formatter(FORMAT))
    handlers[1].setFormatter(JsonFormatter())
    manta = logging.getLogger("manta")
    kept = root.level, manta.level, manta.propagate
    root.setLevel(logging.DEBUG)
    manta.setLevel(logging.DEBUG)
    manta.propagate = True
    for handler in handlers:
        root.addHandler(handler)
    yield texts, lines
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(kept[0])
    manta.setLevel(kept[1])
    manta.propagate = kept[2]


@pytest.fixture
def http(client: Any) -> TestClient:
    app = create_app(client, RequestLimits(max_prompt_chars=5000), keys=ApiKeys([ApiKey.parse(f"acme={KEY}", "here")]))
    return TestClient(app, raise_server_exceptions=False, headers={"authorization": f"Bearer {KEY}"})


def access(lines: io.StringIO) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [record for record in records if record["logger"] == "manta.access"]


def test_lines_of_requests_may_be_left_out(client: Any, logs: tuple[io.StringIO, io.StringIO]) -> None:
    for is_written in (True, False):
        app = create_app(client, RequestLimits(), IngressConfig(access_log=is_written))
        assert TestClient(app).post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200
        assert len(access(logs[1])) == 1


def test_a_line_of_json(http: TestClient, client: Any, logs: tuple[io.StringIO, io.StringIO]) -> None:
    own = client.generate

    def generate(model: str, request: Any, route: Any = None) -> Any:
        """Notes what the ingress would."""
        record = CURRENT.get()
        assert record is not None
        leg = Leg(record.started, record.started, "replica-7", first_at=record.started + 0.25)
        record.add(GenerationRecord(model, request.request_id, 3, legs=[leg], num_output_tokens=9))
        return own(model, request, route)

    client.generate = generate
    headers = {"x-request-id": "abc-1", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}, headers=headers).status_code == 200
    (line,) = access(logs[1])
    assert line["msg"].startswith("POST /v1/completions 200 ")
    assert line["level"] == "INFO"
    assert (line["request_id"], line["trace_id"], line["status"]) == ("abc-1", TRACE, 200)
    assert (line["model"], line["replica"], line["tokens"], line["attempts"]) == ("m", "replica-7", 9, 1)
    assert line["ttft_s"] == 0.25
    assert line["e2e_s"] > 0
    assert line["tenant"] not in (None, "acme")


def test_a_line_of_rays_json(http: TestClient, logs: tuple[io.StringIO, io.StringIO]) -> None:
    """Where Serve's own files hold JSON, its formatter writes our lines."""
    (handler,) = (one for one in logging.getLogger().handlers if getattr(one, "stream", None) is logs[1])
    handler.setFormatter(JSONFormatter())
    assert http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}).status_code == 200
    records = [json.loads(line) for line in logs[1].getvalue().splitlines()]
    (line,) = [record for record in records if record["message"].startswith("POST /v1/completions 200 ")]
    assert line["manta_fields"]["status"] == 200
    assert line["message"].endswith(line["manta_fields"]["request_id"])


def test_nothing_of_clients_is_logged(http: TestClient, client: Any, logs: tuple[io.StringIO, io.StringIO]) -> None:
    """Whole, streamed, refused in every way, failed in the engine before and behind the first token."""
    say = {"prompt": f"{PROMPT} {PROMPT}"}
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    assert PROMPT in http.post("/v1/completions", json=say).text, "the scripted engine says what it was asked"
    assert http.post("/v1/completions", json={**say, "stream": True}).text.endswith("[DONE]\n\n")
    statuses = [
        http.post("/v1/chat/completions", json=chat).status_code,
        http.post("/v1/responses", json={"input": PROMPT}).status_code,
        http.post("/v1/messages", json={**chat, "model": "m", "max_tokens": 5}).status_code,
        http.post("/v1/completions", json={**say, "nonsense": PROMPT}).status_code,
        http.post("/v1/completions", json={**say, "temperature": PROMPT}).status_code,
        http.post("/v1/completions", content=f'{{"prompt": "{PROMPT}').status_code,
        http.post("/v1/completions", json={"prompt": PROMPT * 1000}).status_code,
        http.post("/v1/completions", json=say, headers={"authorization": f"Bearer {KEY}-wrong"}).status_code,
        http.post("/v1/completions", json={**say, "model": "nobody"}).status_code,
        http.post("/tokenize", json=say).status_code,
    ]
    assert statuses == [200, 200, 200, 400, 400, 400, 400, 401, 404, 200]
    for after, error in ((0, EngineDeadError("gone")), (1, EngineDeadError("gone")), (1, RuntimeError("a bug"))):
        client.fail_after = (after, error)
        assert http.post("/v1/completions", json=say).status_code >= 500
        http.post("/v1/completions", json={**say, "stream": True})
    for log in logs:
        text = log.getvalue()
        assert text.count("/v1/completions") >= 12
        assert "a bug" in text, "faults of ours are logged"
        for secret in (PROMPT, KEY, "quetzalcoatl"):
            assert secret not in text


def test_a_path_is_one_short_word_of_one_line(http: TestClient, logs: tuple[io.StringIO, io.StringIO]) -> None:
    http.get("/v1/a%0a2026-11-22%20INFO%20manta.access:%20forged" + "%1b[2J" + "x" * 5000)
    (line,) = [line for line in logs[0].getvalue().splitlines() if " manta.access: GET " in line]
    assert "GET /v1/a%0A2026-11-22%20INFO%20manta.access:%20forged" in line
    assert "\x1b" not in line
    assert len(line) < 1500


@pytest.mark.parametrize("path", ["/health", "/metrics", "/metrics/targets", "/metrics/replicas/engine:m:0"])
def test_what_is_scraped_is_not_logged(path: str, http: TestClient, logs: tuple[io.StringIO, io.StringIO]) -> None:
    http.get(path)
    assert access(logs[1]) == []


def test_each_json_line_is_one_object(logs: tuple[io.StringIO, io.StringIO]) -> None:
    logger = logging.getLogger("manta.test")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it\nfailed")
    (line,) = logs[1].getvalue().splitlines()
    told = json.loads(line)
    assert told["msg"] == "it\nfailed"
    assert told["exception"].endswith("ValueError: two\nlines")
