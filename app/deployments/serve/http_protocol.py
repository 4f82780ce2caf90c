"""uvicorn's HTTP with one write instead of two for the head of an answer and what comes right behind it.

uvicorn writes both at once, each a call to the system and a packet that the proxy before it reads, parses and sends on.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEAD = b"HTTP/1."  # a body that begins so is held, too, and as short a while


class HeldHead:
    """Keeps a head until the next write, at most to the next turn of the event loop; all else is the transport's."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write, later if it is a head."""
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(_HEAD):
            self._held = data
            asyncio.get_running_loop().call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        """Close the connection behind what was written."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # one of two, by what is installed
    """Writes through HeldHead."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Called once, at the beginning."""
        super().connection_made(HeldHead(transport))
