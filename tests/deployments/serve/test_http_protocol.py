"""What an answer's parts look like on their way to the system."""

from __future__ import annotations

import asyncio
from typing import Any

from app.deployments.serve.http_protocol import HeldHead
from tests.limits import run

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Transport:
    """Keeps what is written, and that it was closed."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.written.append(b"closed")

    def is_closing(self) -> bool:
        return b"closed" in self.written


def written(*calls: tuple[str, Any]) -> tuple[list[bytes], list[bytes]]:
    """What calls of one turn of the event loop write within it, and in all."""

    async def call() -> tuple[list[bytes], list[bytes]]:
        transport = Transport()
        held: Any = HeldHead(transport)  # type: ignore[arg-type]
        for name, arguments in calls:
            getattr(held, name)(*arguments)
        at_once = list(transport.written)
        await asyncio.sleep(0)
        assert held.is_closing() == transport.is_closing()
        return at_once, transport.written

    return run(call())


def test_a_head_goes_with_what_comes_behind_it() -> None:
    both = [HEAD + b"body"]
    assert written(("write", (HEAD,)), ("write", (b"body",))) == (both, both)


def test_a_head_alone_goes_in_the_next_turn() -> None:
    assert written(("write", (HEAD,))) == ([], [HEAD])


def test_nothing_else_is_held_and_all_stays_in_order() -> None:
    calls = [("write", (data,)) for data in (b"a", HEAD, b"b", b"c", HEAD, HEAD, b"d", HEAD)]
    at_once = [b"a", HEAD + b"b", b"c", HEAD + HEAD, b"d"]
    assert written(*calls) == (at_once, [*at_once, HEAD])


def test_a_connection_closes_behind_its_head() -> None:
    both = [HEAD, b"closed"]
    assert written(("write", (HEAD,)), ("close", ())) == (both, both)
