"""Fetching pictures: what may be asked, what is dialled, and that nothing else is. Servers are the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from app.config.media import MediaConfig
from app.errors import InvalidRequestError
from app.media.fetching import Fetcher, is_public_address
from tests import limits

PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
    *("255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1"),
    *("::7f00:1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a00:1::1"),
    *("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:db8::1", "not an address", "0x7f.1", "127.1", ""),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public_address(address)


def test_addresses_that_are() -> None:
    assert all(map(is_public_address, ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "2002:808:808::")))


REFUSED = [
    ("http://other.example/a.png", "none of those"),
    ("http://images.example.evil.example/a.png", "none of those"),
    ("http://images.example@other.example/", "credentials"),
    ("http://user:pw@images.example/", "credentials"),
    ("http://images.example:22/", "port"),
    ("http://images.example:99999/", "is no URL"),
    ("http://127.0.0.1/", "none of those"),
    ("http://2130706433/", "none of those"),
    ("http://[::1]/", "none of those"),
    ("http://[::1/", "is no URL"),
    ("http://straße.example/", "ASCII"),
    ("http://10.0.0.9/", "not public"),
    ("http://images.example\\@other.example/", "is no URL"),
    ("http://images.example/ a", "is no URL"),
    ("http://images.example/\n", "is no URL"),
    ("http:///a.png", "none of those"),
    ("ftp://images.example/", "only http and https"),
    ("http://images.example/" + "a" * 9000, "is no URL"),
]


def fetcher(look_up: Any = None, port: int = 80, is_public: Any = None, **options: Any) -> Fetcher:
    names = ("images.example", "mirror.example", "10.0.0.9")
    config = MediaConfig(allowed_media_domains=names, max_image_bytes=1000, **options)
    return Fetcher(config, look_up, {"http": port, "https": port}, is_public)


async def nobody(host: str, port: int) -> list[str]:
    raise AssertionError(f"{host} was looked up")


@pytest.mark.parametrize(("url", "says"), REFUSED, ids=[url[:40] for url, _ in REFUSED])
def test_what_is_refused_is_not_looked_up(url: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        asyncio.run(fetcher(nobody).fetch(url))
    assert "10.0" not in caught.value.message


def test_no_host_is_allowed_unless_it_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="none of those that this server may ask"):
        asyncio.run(Fetcher(MediaConfig(), nobody).fetch("http://images.example/a.png"))


@asynccontextmanager
async def serving(asked: list[str]) -> AsyncIterator[int]:
    """A server with good and bad pictures; `asked` gets the hosts and paths that it is asked for."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(f"{request.headers['Host'].partition(':')[0]}{request.path}")
        match request.path:
            case "/good":
                return web.Response(body=b"picture")
            case "/large":
                return web.Response(body=b"x" * 1001)
            case "/endless" | "/slow":
                response = web.StreamResponse()
                response.enable_chunked_encoding()
                await response.prepare(request)
                for _ in range(100_000):
                    await response.write(b"x" * 100)
                    if request.path == "/slow":
                        await asyncio.Event().wait()
                return response
            case "/packed":
                return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
            case "/loop":
                raise web.HTTPFound("/loop")
            case "/missing":
                return web.Response(status=404)
        raise web.HTTPFound(request.query["to"])

    server = web.Server(answer)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        assert site._server is not None
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    finally:
        await runner.shutdown()
        await runner.cleanup()


ANSWERS = [
    ("/large", "a picture may have 1000"),
    ("/endless", "more than the 1000 bytes"),
    ("/packed", "compressed"),
    ("/missing", "status 404"),
    ("/to?to=http://other.example/", "none of those"),
    ("/to?to=http://127.0.0.1/", "none of those"),
    ("/to?to=http://10.0.0.9/", "not public"),
    ("/to?to=ftp://images.example/", "only http"),
    ("/to?to=file:///etc/passwd", "only http"),
    ("/loop", "more than 3 redirects"),
]


def test_answers_and_redirects() -> None:
    asked: list[str] = []

    async def local(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def run() -> None:
        async with serving(asked) as port:
            own = fetcher(local, port, lambda address: address == "127.0.0.1", fetch_timeout_s=limits.patience_s())
            base = f"http://images.example:{port}"
            assert await own.fetch(f"{base}/good") == b"picture"
            assert await own.fetch(f"{base}/to?to=http://mirror.example:{port}/good") == b"picture"
            assert asked == ["images.example/good", "images.example/to", "mirror.example/good"]
            for path, says in ANSWERS:
                with pytest.raises(InvalidRequestError, match=says):
                    await own.fetch(base + path)
            hasty = fetcher(local, port, lambda _: True, fetch_timeout_s=limits.scaled_s(0.1))
            with pytest.raises(InvalidRequestError, match="not fetched within"):
                await hasty.fetch(f"{base}/slow")

    asyncio.run(run())


def test_a_name_that_changes_its_address_reaches_nothing() -> None:
    """Looked up once: what was checked is what is dialled. One address that is not public refuses them all."""
    asked: list[str] = []
    looked_up: list[str] = []

    async def rebinding(host: str, port: int) -> list[str]:
        looked_up.append(host)
        return ["192.0.2.1"] if len(looked_up) % 2 else ["127.0.0.1"]

    async def mixed(host: str, port: int) -> list[str]:
        return ["192.0.2.1", "127.0.0.1"]

    async def run() -> None:
        async with serving(asked) as port:
            url = f"http://images.example:{port}/good"
            options = {"fetch_timeout_s": limits.scaled_s(0.2)}
            for look_up in (rebinding, rebinding, mixed):
                with pytest.raises(InvalidRequestError, match=r"not public|not fetched"):
                    await fetcher(look_up, port, lambda address: address != "127.0.0.1", **options).fetch(url)

    asyncio.run(run())
    assert len(looked_up) == 2
    assert asked == []
