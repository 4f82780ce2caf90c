"""Keys, prompts and answers are in no log, whatever goes well or wrong."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

import httpx
import pytest

from app.api.http.auth import ApiKey, ApiKeys
from app.api.server.app import create_app
from app.config.limits import RequestLimits

KEY, PROMPT, WRONG = "canary-key-0123456789", "canary-prompt-0123456789", "canary-wrong-0123456789"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}]}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": -1}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": PROMPT}]}]}),
    (COMPLETIONS, {"prompt": PROMPT, "stop": 7}),
    (COMPLETIONS, {"prompt": PROMPT * 1000}),
    ("/v1/responses", {"input": PROMPT, "instructions": PROMPT}),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": PROMPT}]}),
    ("/v1/messages", {"model": PROMPT, "max_tokens": 5, "messages": [{"role": "user", "content": PROMPT}]}),
)


@pytest.mark.parametrize("fails", [False, True])
def test_no_log_holds_them(client: Any, caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    caplog.set_level(logging.DEBUG)
    if fails:
        client.fail_after = (2, RuntimeError("the engine fails"))
    app = create_app(client, RequestLimits(), keys=ApiKeys([ApiKey.parse(f"alice={KEY}", "here")]))

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            answers = [
                await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
                for path, body in BODIES
                for key in (KEY, WRONG)
            ]
        return [answer.status_code for answer in answers]

    statuses = asyncio.run(ask())
    assert {200, 400, 401} - ({200} if fails else set()) <= set(statuses)
    logged = "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in caplog.records)
    assert "401" in logged or "POST" in logged, "nothing is logged at all"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    for secret in (KEY, PROMPT, WRONG, digest):
        assert secret not in logged
