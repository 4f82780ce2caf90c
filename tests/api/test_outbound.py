"""A request may name any address: the server asks none of them, and says which field it does not take (SSRF)."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import ScriptedClient
from tests.media.media_model import reader, seeing, write_media_model

URLS = (
    "http://169.254.169.254/latest/meta-data/",
    "http://127.0.0.1:8265/api/jobs/",
    "https://example.com\\@127.0.0.1/x.png",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "data:image/jpeg;base64,/9j/4AAQSkZJRg==",
)
CONNECTING = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")

_seen: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in CONNECTING:
        _seen.append(f"{event}{arguments[1:]}")


sys.addaudithook(_listen)  # for good, but it hears nothing outside of these tests


@pytest.fixture
def connections() -> Iterator[list[str]]:
    """What the process asked of the network meanwhile."""
    global _seen
    _seen = []
    yield _seen
    _seen = None


def bodies(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place of every dialect where some server takes an address."""
    text = {"type": "text", "text": "look"}
    chat_parts: tuple[dict[str, Any], ...] = (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "file", "file": {"file_data": url}},
    )
    for part in chat_parts:
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [text, part]}]}
        yield "/tokenize", {"messages": [{"role": "user", "content": [text, part]}]}
    for item in ({"type": "input_image", "image_url": url}, {"type": "input_file", "file_url": url}):
        yield "/v1/responses", {"input": [{"role": "user", "content": [item]}]}
        yield "/v1/responses/input_tokens", {"input": [{"role": "user", "content": [item]}]}
    mcp = {"type": "mcp", "server_label": "x", "server_url": url}
    yield "/v1/responses", {"input": "hi", "tools": [mcp]}
    source = {"type": "url", "url": url}
    for kind in ("image", "document"):
        message = {"role": "user", "content": [{"type": kind, "source": source}]}
        yield "/v1/messages", {"model": "m", "max_tokens": 5, "messages": [message]}
    servers = [{"type": "url", "url": url, "name": "x"}]
    hello = [{"role": "user", "content": "hi"}]
    yield "/v1/messages", {"model": "m", "max_tokens": 5, "messages": hello, "mcp_servers": servers}


@pytest.fixture(scope="module")
def seeing_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedClient]:
    own = reader()
    yield ScriptedClient(seeing(write_media_model(tmp_path_factory.mktemp("media") / "m"), own))
    own.close()


@pytest.mark.parametrize("sees", [False, True])
@pytest.mark.parametrize("url", URLS)
def test_no_address_of_a_request_is_asked(
    client: Any, seeing_client: Any, connections: list[str], url: str, sees: bool
) -> None:
    client = seeing_client if sees else client

    async def ask() -> list[tuple[str, httpx.Response]]:
        transport = httpx.ASGITransport(create_app(client, RequestLimits()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return [(path, await http.post(path, json=body)) for path, body in bodies(url)]

    for path, answer in asyncio.run(ask()):
        assert answer.status_code == 400, (path, answer.text)
        assert json.loads(answer.text)["error"]["message"]
    assert connections == []
    assert client.requests == []


def test_a_connection_would_be_seen(connections: list[str]) -> None:
    import socket

    with socket.socket() as probe:
        probe.settimeout(1.0)
        with pytest.raises(OSError):
            probe.connect(("127.0.0.1", 1))
    assert connections


@pytest.mark.slow
def test_a_network_of_its_own_sees_no_packet(tmp_path: Path) -> None:
    """Of every hostile medium and address, whatever process of the server's would send it."""
    alone = ["unshare", "--net", "sh", "-c"]
    way_out = "ip link set lo up && ip route add default dev lo"
    if shutil.which("unshare") is None or subprocess.run([*alone, way_out], capture_output=True).returncode:
        pytest.skip("this machine gives nobody a network of their own")
    asked = [*alone, f'{way_out} && exec "$@"', "sh", sys.executable, "-m", "tests.api.quiet_network", str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["statuses"]) >= 120 + len(URLS)
    assert set(said["statuses"]) <= {200, 400}
    assert said["sent"] == 0
    assert said["sent_by_one_connection"] > 0
