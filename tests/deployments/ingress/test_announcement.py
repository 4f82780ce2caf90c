"""The line that says that the server is open: the right address, a request a shell can run, never an exception."""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import shlex
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from app.deployments.ingress import announcement
from app.deployments.ingress.announcement import announce, base_url, opening_line


def details(prefix: str | None = "/", **http_options: Any) -> dict[str, Any]:
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": 8000, "root_path": "", **http_options},
        "applications": {"manta": {"route_prefix": prefix}},
    }


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (details(), "http://127.0.0.1:8000"),
        (details("/llm"), "http://127.0.0.1:8000/llm"),
        (details(host="0.0.0.0", port=80), "http://127.0.0.1:80"),
        (details(host="::1"), "http://[::1]:8000"),
        (details(root_path="/root"), "http://127.0.0.1:8000/root"),
        (details(None), None),
        ({**details(), "proxy_location": "Disabled"}, None),
        ({**details(), "applications": {}}, None),
    ],
)
def test_address(given: dict[str, Any], url: str | None) -> None:
    assert base_url(given, "manta") == url


def test_request_survives_a_shell() -> None:
    line = opening_line("http://h:1/llm", 'it\'s "mine"')
    assert "\n" not in line
    assert line.startswith("open at http://h:1/llm ")
    words = shlex.split(line[line.index("curl ") :])
    assert words[1] == "http://h:1/llm/v1/chat/completions"
    assert words[2:4] == ["-H", "Content-Type: application/json"]
    body = json.loads(words[words.index("-d") + 1])
    assert body == {"model": 'it\'s "mine"', "messages": [{"role": "user", "content": "Hello!"}]}


def test_request_of_a_server_with_keys_takes_one_from_the_shell() -> None:
    line = opening_line("http://h:1", "m", needs_key=True)
    request = "printf '%s\\n' " + line[line.index("curl ") :]
    printed = subprocess.run(["sh", "-c", request], env={"MANTA_API_KEY": "k 1"}, capture_output=True, text=True)
    assert "Authorization: Bearer k 1" in printed.stdout.splitlines()


class Health(http.server.BaseHTTPRequestHandler):
    """Unhealthy twice, then healthy."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if len(self.asked) > 2 else 503)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def health() -> Iterator[tuple[int, list[str]]]:
    asked: list[str] = []
    handler = type("Handler", (Health,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], asked
        server.shutdown()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(announcement.logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("manta"), "propagate", True)
    caplog.set_level(logging.INFO, "manta.ingress")
    return caplog


def test_said_only_once_it_answers(
    health: tuple[int, list[str]], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, asked = health
    monkeypatch.setattr(announcement, "_serve_details", lambda: details("/x", port=port))
    asyncio.run(announce("manta", "m"))
    assert asked == ["/x/health"] * 3
    assert [record.getMessage() for record in said.records] == [opening_line(f"http://127.0.0.1:{port}/x", "m")]


def test_no_answer_is_a_warning(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcement, "_serve_details", lambda: details(port=1))
    monkeypatch.setattr(announcement, "OPEN_TIMEOUT_S", 0.0)
    asyncio.run(announce("manta", "m"))
    assert [record.levelname for record in said.records] == ["WARNING"]
    assert "http://127.0.0.1:1 does not answer" in said.text


def test_trouble_never_reaches_the_ingress(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("no controller")

    monkeypatch.setattr(announcement, "_serve_details", fail)
    asyncio.run(announce("manta", "m"))
    assert "no controller" in said.text
