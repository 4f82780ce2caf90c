"""Asks a server that fetches nothing about every hostile medium and address, and says how many packets left meanwhile.

Run in a network of its own, whose only way out is its loopback: `python -m tests.api.quiet_network FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

import httpx

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import ScriptedClient
from tests.api.test_outbound import URLS, bodies
from tests.media.hostile import cases
from tests.media.media_model import reader, seeing, write_media_model


def num_sent() -> int:
    """Packets that left by any interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[9]) for line in lines)


async def ask(client: ScriptedClient) -> list[int]:
    """The statuses of all answers."""
    transport = httpx.ASGITransport(create_app(client, RequestLimits()))
    asked = [one for url in URLS for one in bodies(url)]
    for _, url, _ in cases():
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        asked.append(("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return [(await http.post(path, json=body)).status_code for path, body in asked]


def main() -> None:
    """Ask, then connect once on purpose."""
    own = reader()
    client = ScriptedClient(seeing(write_media_model(Path(sys.argv[1]) / "m"), own))
    before = num_sent()
    statuses = asyncio.run(ask(client))
    sent = num_sent() - before
    own.close()
    with socket.socket() as once:
        once.setblocking(False)
        once.connect_ex(("192.0.2.1", 80))  # says at once that it is under way
    print(json.dumps({"statuses": statuses, "sent": sent, "sent_by_one_connection": num_sent() - before - sent}))


if __name__ == "__main__":
    main()
