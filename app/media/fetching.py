"""Fetches pictures and sounds over http from hosts that the configuration allows, and reaches nothing else by that.

A name is looked up once for each connection, which goes to the address that was checked and to no other. Addresses that
are not public are refused, whatever the name; redirects are checked anew; no proxy, cookie or credential is used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from app.config.media import MediaConfig
from app.errors import InvalidRequestError, UnsupportedError
from app.media.source import NOUN, check_bytes
from app.records.media import MediaKind

PORTS = {"http": 80, "https": 443}
MAX_URL_CHARS = 8192
_PIECE_BYTES = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not of the internet, though `ipaddress` calls them global: addresses of IPv4 in old forms, local NAT64, site-local.
_OTHERS = [ipaddress.ip_network(one) for one in ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "fec0::/10")]
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "manta"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
LookUp = Callable[[str, int], Awaitable[list[str]]]  # the addresses of a host


@dataclass(slots=True, frozen=True)
class _Wanted:
    """Says what is fetched, and how much of it may come."""

    kind: MediaKind
    max_bytes: int
    hold: Callable[[int], None]


class Fetcher:
    """`look_up` finds addresses, `ports` are those that may be asked, by scheme; tests give their own of both."""

    def __init__(
        self,
        config: MediaConfig,
        look_up: LookUp | None = None,
        ports: dict[str, int] | None = None,
        is_public: Callable[[str], bool] | None = None,
    ) -> None:
        self._config = config
        self._look_up = look_up or _addresses
        self._ports = ports or PORTS
        self._is_public = is_public or is_public_address

    async def fetch(
        self,
        url: str,
        hold: Callable[[int], None] = lambda _: None,
        kind: MediaKind = "image",
        max_bytes: int | None = None,
    ) -> bytes:
        """The bytes at `url`, at most `max_bytes` (None: as many as a picture may have); `hold` is told how many more
        have come, and may refuse them. InvalidRequestError says why there are none, and tells no address; the message
        goes on behind the name of the field."""
        self._check(url)  # before anything is opened
        wanted = _Wanted(kind, self._config.max_image_bytes if max_bytes is None else max_bytes, hold)
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await self._follow(url, wanted)
        except TimeoutError:
            raise InvalidRequestError(f"was not fetched within {self._config.fetch_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidRequestError(f"was not fetched: {_reason(error)}") from None

    async def _follow(self, url: str, wanted: _Wanted) -> bytes:
        headers = {**_HEADERS, "Accept": f"{wanted.kind}/*"}
        connector = aiohttp.TCPConnector(resolver=_Checked(self._look_up, self._is_public), force_close=True, limit=1)
        async with aiohttp.ClientSession(
            connector=connector, trust_env=False, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            for _ in range(self._config.max_redirects + 1):
                async with session.get(url, allow_redirects=False, headers=headers) as response:
                    if response.status not in _REDIRECTS:
                        return await self._body(response, wanted)
                    url = urljoin(url, response.headers.get("Location", ""))
                self._check(url)
        raise InvalidRequestError(f"was not fetched: more than {self._config.max_redirects} redirects")

    async def _body(self, response: aiohttp.ClientResponse, wanted: _Wanted) -> bytes:
        if response.status != 200:
            raise InvalidRequestError(f"was not fetched: the server answered with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise InvalidRequestError("was not fetched: the server sends it compressed, which was not asked for")
        most = wanted.max_bytes
        check_bytes(response.content_length or 0, most, wanted.kind)
        body = bytearray()
        async for piece in response.content.iter_chunked(_PIECE_BYTES):
            body += piece
            if len(body) > most:
                raise InvalidRequestError(f"has more than the {most} bytes that a {NOUN[wanted.kind]} may have")
            wanted.hold(len(piece))
        return bytes(body)

    def _check(self, url: str) -> None:
        """Refuse what may not be asked for, by the URL alone."""
        if len(url) > MAX_URL_CHARS or not (url.isascii() and url.isprintable()) or " " in url or "\\" in url:
            raise InvalidRequestError(f"is no URL of at most {MAX_URL_CHARS} ASCII characters")
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").encode("idna").decode().rstrip(".").lower()
            port = parts.port
        except ValueError:
            raise InvalidRequestError("is no URL") from None
        if parts.scheme not in self._ports:
            raise UnsupportedError("is not fetched: only http and https are")
        if parts.username is not None or parts.password is not None:
            raise UnsupportedError("is not fetched: it holds credentials")
        if port not in (None, self._ports[parts.scheme]):
            raise UnsupportedError("is not fetched: its port is not the usual one")
        if host not in self._config.allowed_media_domains:
            raise UnsupportedError("is not fetched: its host is none of those that this server may ask")
        if _address(host) is not None and not self._is_public(host):
            raise UnsupportedError("is not fetched: its host is not public")


class _Checked(AbstractResolver):
    """Looks a name up and gives its addresses only where every one of them is public."""

    def __init__(self, look_up: LookUp, is_public: Callable[[str], bool]) -> None:
        self._look_up = look_up
        self._is_public = is_public

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """See AbstractResolver."""
        found = await self._look_up(host, port)
        if not found or not all(map(self._is_public, found)):
            raise UnsupportedError("is not fetched: its host is not public")
        return [_result(host, port, address) for address in found]

    async def close(self) -> None:
        """See AbstractResolver."""


def _result(host: str, port: int, address: str) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=flags)


async def _addresses(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found: list[Any] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public_address(text: str) -> bool:
    """True if an address is one of the public internet, also where another one is packed into it (6to4, NAT64, ...)."""
    address = _address(text)
    if address is None or not address.is_global or address.is_multicast:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None or address.teredo is not None or any(address in one for one in _OTHERS):
            return False
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return inner is None or is_public_address(str(inner))
    return True


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    """Returns what went wrong without addresses, which would tell what stands behind a name."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "its host cannot be reached"
    return "the server's answer is malformed"
