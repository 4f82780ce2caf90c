"""What an upload meets before its body is read: pages of other sites, and bounds on what is under way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests import limits

HEAD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
HEAD += b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
TAIL = b"\r\n--b--\r\n"
FORM = {"content-type": "multipart/form-data; boundary=b"}


def http(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here:8000", headers=FORM)


@pytest.mark.parametrize(
    ("headers", "origins", "status"),
    [
        ({}, (), 200),
        ({"origin": "http://here:8000", "sec-fetch-site": "same-origin"}, (), 200),
        ({"origin": "http://here:8000"}, (), 200),
        ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, (), 403),
        ({"origin": "http://here:3000", "sec-fetch-site": "same-site"}, (), 403),
        ({"origin": "http://evil.example"}, (), 403),
        ({"origin": "null"}, (), 403),
        ({"origin": "http://evil.example", "sec-fetch-site": "cross-site"}, ("http://good.example",), 403),
        ({"origin": "http://good.example", "sec-fetch-site": "cross-site"}, ("http://good.example",), 200),
        ({"origin": "http://any.example", "sec-fetch-site": "cross-site"}, ("*",), 200),
    ],
)
def test_a_page_of_another_site_keeps_nothing_here(client: Any, headers: Any, origins: Any, status: int) -> None:
    async def go() -> None:
        async with http(create_app(client, RequestLimits(), IngressConfig(cors_origins=origins))) as sender:
            answer = await sender.post("/v1/files", content=HEAD + b"{}" + TAIL, headers=headers)
            assert answer.status_code == status, answer.text
            assert len((await sender.get("/v1/files")).json()["data"]) == (status == 200)

    limits.run(go())


def test_uploads_under_way_are_bounded(client: Any) -> None:
    """The second of a tenant is refused at once while the first comes; afterwards there is room again."""
    config = IngressConfig(max_tenant_file_store_bytes=100_000)
    gate = asyncio.Event()
    num_read = 0

    async def slow() -> AsyncIterator[bytes]:
        yield HEAD
        await gate.wait()
        yield b"x" * 60_000 + TAIL

    async def unread() -> AsyncIterator[bytes]:
        nonlocal num_read
        num_read += 1
        yield HEAD + b"x" * 60_000 + TAIL

    async def go() -> None:
        length = {"content-length": str(len(HEAD + TAIL) + 60_000)}
        async with http(create_app(client, RequestLimits(), config)) as sender:
            first = asyncio.create_task(sender.post("/v1/files", content=slow(), headers=length))
            await limits.async_pause(0.1)
            refused = await sender.post("/v1/files", content=unread(), headers=length)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert (await sender.post("/v1/files", content=unread())).status_code == 429, "one of unknown length"
            gate.set()
            assert (await first).status_code == 200
            full = await sender.post("/v1/files", content=unread(), headers={"content-length": "200000"})
            assert (full.status_code, full.json()["error"]["code"]) == (413, "storage_full")
            assert num_read == 0
            await sender.delete(f"/v1/files/{(await first).json()['id']}")
            assert (await sender.post("/v1/files", content=HEAD + b"{}" + TAIL)).status_code == 200

    limits.run(go())


def test_what_is_uploaded_is_what_came(client: Any) -> None:
    async def go() -> None:
        async with http(create_app(client, RequestLimits())) as sender:
            content = json.dumps({"a": 1}).encode()
            kept = (await sender.post("/v1/files", content=HEAD + content + TAIL)).json()
            assert (await sender.get(f"/v1/files/{kept['id']}/content")).content == content

    limits.run(go())
