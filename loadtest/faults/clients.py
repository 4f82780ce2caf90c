"""Clients that harm others, or would: they do not read, leave, send what is no request, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from typing import Any

import httpx

from loadtest.faults.fault import Fault
from loadtest.faults.mix import CHAT, COMPLETIONS, MODEL, Ask
from loadtest.faults.reply import Reply, send
from loadtest.faults.site import Site
from loadtest.faults.traffic import client

_NUM_SLOW, _SLOW_S = 100, 10.0
_NUM_LEAVING, _ROUNDS = 100, 3
_NUM_MANY, _MANY_TOKENS = 1000, 20
_FLOOD, _FLOOD_TOKENS = 400, 100
_GROWTH_BYTES = 256 << 10  # of resident memory, for each slow stream
_LOG_BYTES = 64 << 20


def _endless(max_tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": "Go on", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return {**body, "temperature": 0, **fields}


async def _slow(site: Site, rng: random.Random) -> list[str]:
    """Streams that nobody reads, through receive buffers of 4 KiB; memory is measured while they last."""
    before = _resident(site)
    sockets = [_unread(site, _endless(2000)) for _ in range(_NUM_SLOW)]
    await asyncio.sleep(_SLOW_S)
    growth = _resident(site) - before
    for connection in sockets:
        connection.close()
    if growth > _NUM_SLOW * _GROWTH_BYTES:
        return [f"memory grew by {growth / _NUM_SLOW / 1024:.0f} KiB for each slow client"]
    return []


def _unread(site: Site, body: dict[str, Any]) -> socket.socket:
    raw = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(site.base_url.rsplit(":", 1)[1])))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + raw)
    return connection


def _resident(site: Site) -> int:
    """Bytes of all parts that hold something for a stream."""
    parts = ("engine", "worker", "ingress", "haproxy")
    return sum(process.memory_info().rss for part in parts for process in site.part(part))


async def _leaving(site: Site, rng: random.Random) -> list[str]:
    """Clients that leave: before their first token, after some, and such as asked for no stream."""

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        body = _endless(1500, stream=number % 3 > 0, seed=number)
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(rng.random() * 2.0):
                await send(http, Reply(Ask("leaving", COMPLETIONS, body)), 60.0)

    async with client(site.base_url) as http:
        for _ in range(_ROUNDS):
            await asyncio.gather(*(ask(http, number) for number in range(_NUM_LEAVING)))
    return []  # what they leave behind is looked for after every run


_BAD_BODIES: tuple[bytes, ...] = (
    b"", b"{", b"\xff\xfe{}", b"[1]", b"null", b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"', b"[" * 100_000,
    b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "x", "n": 1000000}', b'{"prompt": [99999999]}',
    b'{"prompt": "x", "logprobs": 1000000}', b'{"prompt": "x", "structured_outputs": {"regex": "(a+)+b{1,9999}("}}',
    b'{"prompt": "' + b"x" * 40_000_000,
    b'{"prompt": "x", "logit_bias": {"-1": 1}}', b'{"prompt": "x", "stop": 7}', b'{"prompt": {"a": 1}}',
)  # fmt: skip


_COSTLY_BODIES: tuple[bytes, ...] = (  # they may be answered
    b'{"prompt": "x", "structured_outputs": {"regex": "((a{0,200}){0,200}){0,200}"}}',
    b'{"prompt": "x", "structured_outputs": {"regex": "(a|aa)+(a|aa)+(a|aa)+b"}}',
    b'{"prompt": "x", "stop": ["' + b"ab" * 500 + b'"], "n": 64, "max_tokens": 8}',
)


async def _bad_input(site: Site, rng: random.Random) -> list[str]:
    """What is no request gets a 4xx that an SDK can read, and no part ends of it."""
    before = {process.pid for part in ("engine", "worker", "ingress") for process in site.part(part)}
    found = []
    async with client(site.base_url) as http:
        for number, body in enumerate(_BAD_BODIES):
            for path in (COMPLETIONS, CHAT):
                found += await _refusal(http, path, body, f"bad body {number}", 400)
        for number, body in enumerate(_COSTLY_BODIES):
            found += await _refusal(http, COMPLETIONS, body, f"costly body {number}", 200)
    await asyncio.to_thread(site.look)
    after = {process.pid for part in ("engine", "worker", "ingress") for process in site.part(part)}
    return found + ([] if before == after else [f"{len(before - after)} processes ended"])


async def _refusal(http: httpx.AsyncClient, path: str, body: bytes, name: str, least: int) -> list[str]:
    """What is wrong with the answer, whose status is to be from `least` to 499."""
    try:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"}, timeout=60.0)
    except httpx.HTTPError as error:
        return [f"{name} on {path}: {error!r}"]
    if not least <= answer.status_code < 500:
        return [f"{name} on {path}: status {answer.status_code}: {answer.text[:100]}"]
    return []


async def _many(site: Site, rng: random.Random) -> list[str]:
    """A thousand streams at once: each ends well, or is refused with a 429."""
    replies = await flood(site, _NUM_MANY, _endless(_MANY_TOKENS))
    ends = Counter(_end(reply) for reply in replies)
    return [f"{count} of {_NUM_MANY} streams: {end}" for end, count in ends.items() if end not in ("whole", "429")]


async def _overload(site: Site, rng: random.Random) -> list[str]:
    """One client asks for far more than there is, at low priority; others go on asking as before."""
    replies = await flood(site, _FLOOD, _endless(_FLOOD_TOKENS, priority=10))
    ends = Counter(_end(reply) for reply in replies)
    return [f"{count} of {_FLOOD} streams: {end}" for end, count in ends.items() if end not in ("whole", "429")]


async def flood(site: Site, count: int, body: dict[str, Any]) -> list[Reply]:
    """So many requests at once, each with a seed of its own; their replies once all have ended."""
    replies = [Reply(Ask("flood", COMPLETIONS, {**body, "seed": number})) for number in range(count)]
    async with client(site.base_url) as http:
        await asyncio.gather(*(send(http, reply, 300.0) for reply in replies))
    return replies


def _end(reply: Reply) -> str:
    if reply.answer.is_whole:
        return "whole"
    if reply.status not in (None, 200):
        return str(reply.status)
    return reply.answer.error or reply.broke or reply.end


async def _log_flood(site: Site, rng: random.Random) -> list[str]:
    """Requests that are refused, with long names: what they leave in the logs is bounded."""
    before = _log_bytes(site)
    headers = {"content-type": "application/json", "x-request-id": "r" * 4000}
    async with client(site.base_url) as http:
        for _ in range(20):
            posts = (http.post(COMPLETIONS, content=b'{"prompt": 1.5}', headers=headers) for _ in range(100))
            await asyncio.gather(*posts, return_exceptions=True)
    grown = _log_bytes(site) - before
    return [f"2,000 refusals wrote {grown >> 20} MiB of logs"] if grown > _LOG_BYTES else []


def _log_bytes(site: Site) -> int:
    return sum(path.stat().st_size for path in site.tmp.rglob("*") if path.is_file() and "logs" in path.parts)


FAULTS = (
    Fault("slow_clients", 13, f"{_NUM_SLOW} streams that nobody reads, for {_SLOW_S:.0f} s", _slow),
    Fault("disconnect_storm", 14, f"{_ROUNDS} times {_NUM_LEAVING} clients that leave", _leaving),
    Fault("bad_input", 15, "bodies that are no requests", _bad_input),
    Fault("many_streams", 16, f"{_NUM_MANY} streams at once", _many, is_long=True),
    Fault("overload", 21, f"one client sends {_FLOOD} requests at once", _overload, keeps_on=True, is_long=True),
    Fault("log_flood", 23, "2,000 refused requests with names of 4,000 characters", _log_flood),
)
