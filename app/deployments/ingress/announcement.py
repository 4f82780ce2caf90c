"""The line that says that the server is open: its address, and a request to paste.

Said by the first ingress replica, to whoever watches the console of `serve run`, and only once the address answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.request
from typing import Any

logger = logging.getLogger("manta.ingress")

OPEN_TIMEOUT_S = 60.0
ASK_INTERVAL_S = 0.1
ANSWER_TIMEOUT_S = 5.0
ANY_HOST = frozenset({"0.0.0.0", "::", ""})


async def announce(app_name: str, model: str, pools: bool = False, needs_key: bool = False) -> None:
    """Wait until the application answers at its address, then say so. Never raises: it is only a courtesy."""
    try:
        url = base_url(await asyncio.to_thread(_serve_details), app_name)
        if url is None:  # HTTP is switched off, or the application has no route
            return
        if await _opens(url):
            logger.info("%s", opening_line(url, model, pools, needs_key))
        else:
            logger.warning("%s does not answer this ingress replica; its proxy may run elsewhere", url)
    except Exception as error:
        logger.info("open; its address could not be found out (%s: %s)", type(error).__name__, error)


def opening_line(url: str, model: str, pools: bool = False, needs_key: bool = False) -> str:
    """One line, whose end from `curl` on can be pasted into a shell; a model that `pools` is asked for vectors. A key
    comes from the environment of that shell."""
    chat, embedding = {"messages": [{"role": "user", "content": "Hello!"}]}, {"input": "Hello!"}
    body = json.dumps({"model": model, **(embedding if pools else chat)}, ensure_ascii=False)
    quoted = body.replace("'", "'\\''")
    path = "/pooling" if pools else "/v1/chat/completions"
    key = ' -H "Authorization: Bearer $MANTA_API_KEY"' if needs_key else ""
    request = f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{quoted}'"
    return f"open at {url} (chat page; figures at {url}/status). Try: {request}"


def base_url(details: dict[str, Any], app_name: str) -> str | None:
    """Returns where Serve's details say that an application answers, seen from its own machine; without a slash
    at the end."""
    http = details.get("http_options") or {}
    prefix = (details.get("applications") or {}).get(app_name, {}).get("route_prefix")
    if details.get("proxy_location") == "Disabled" or prefix is None or http.get("port") is None:
        return None
    host = http.get("host") or ""
    host = "127.0.0.1" if host in ANY_HOST else host
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{http['port']}{http.get('root_path') or ''}{prefix}".rstrip("/")


def _serve_details() -> dict[str, Any]:
    """Blocks. Serve tells the same to its own dashboard; there is no public way to it inside a replica."""
    from ray.serve.context import _get_global_client

    details: dict[str, Any] = _get_global_client().get_serve_details()
    return details


async def _opens(url: str) -> bool:
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while not await asyncio.to_thread(_answers, f"{url}/health"):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(ASK_INTERVAL_S)
    return True


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine is not behind its own proxy
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
            return int(answer.status) == 200
    except (OSError, ValueError):
        return False
