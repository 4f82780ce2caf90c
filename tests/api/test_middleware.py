"""Request ids and the access log."""

from __future__ import annotations

import logging

import httpx
import pytest


def test_the_client_s_request_id_is_echoed(http: httpx.Client) -> None:
    assert http.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/nowhere", headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    first, second = (http.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert len(http.get("/version", headers={"x-request-id": "x" * 300}).headers["x-request-id"]) == 32


def test_pages_of_other_origins_may_not_call(http: httpx.Client) -> None:
    """A page that a user happens to visit must not use a server that only this user can reach."""
    origin = {"origin": "http://page.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert http.options("/v1/chat/completions", headers=asked).status_code == 405
    assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin).headers


def test_one_line_a_request(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="manta.access"):
        http.get("/version", headers={"x-request-id": "line-1"})
        http.post("/v1/completions", json={"prompt": "secret words", "foo": 1}, headers={"x-request-id": "line-2"})
        http.get("/health")
    lines = [record.getMessage() for record in caplog.records if record.name == "manta.access"]
    assert len(lines) == 2, "health checks do not fill the log"
    assert lines[0].startswith("GET /version 200 ")
    assert lines[0].endswith(" line-1")
    assert lines[1].startswith("POST /v1/completions 400 ")
    assert "secret" not in "".join(lines)
