"""The neighbour of heavy loads: over an application in this process, with a load that does little."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from loadtest import hostile_loads, neighbours
from loadtest.neighbours import Chat, Waits, faults, main, table


def row(slowest_s: float, status: int = 200) -> dict[str, Any]:
    waits = Waits([Chat(0.0, 0.1, 200), Chat(1.0, slowest_s, status)])
    return {
        "load": "blanks", "quiet": waits.as_json(), "beside": waits.as_json(), "answers": {"200": 8},
        "load_took_s": 2.0, "machine_load": [0.5], "waits": [],
    }  # fmt: skip


def test_a_chat_that_waits_or_fails_is_named() -> None:
    assert faults([row(0.4)], 0.5) == []
    assert faults([row(0.6)], 0.5) == ["blanks: a chat of the neighbour took 0.60 s"]
    assert faults([row(0.2, status=503)], 0.5) == ["blanks: 1 chats of the neighbour failed"]
    assert "| blanks | 200: 8 | 2.0 | 0.250 / 0.400 | 2, 0.250 / 0.400 | 0 | 0.5 |" in table([row(0.4)])


def test_unknown_loads_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["blankets"])
    assert "blankets" in capsys.readouterr().err


def test_loads_send_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        found = {"id": "x", "status": "completed", "request_counts": {"completed": 5}, "output_file_id": "o"}
        return httpx.Response(200, json=found)

    monkeypatch.setattr(hostile_loads, "NUM_LINES", 5)
    monkeypatch.setattr(hostile_loads, "BLANK_BYTES", 9)
    tenant = hostile_loads.Tenant("http://server", "a-key", transport=httpx.MockTransport(answer))
    answers = {name: load(tenant) for name, load in hostile_loads.LOADS.items()}
    assert answers["batch"] == Counter({"200": 1, "lines": 5})
    assert [answers[name]["200"] for name in ("prompt_logprobs", "background", "blanks")] == [8, 200, 8]
    assert [answers[name]["200"] for name in ("logit_bias", "schemas")] == [16, 16]
    assert {request.headers["authorization"] for request in sent} == {"Bearer a-key"}
    assert "DELETE /v1/files/o" in {f"{request.method} {request.url.path}" for request in sent}
    assert neighbours.KEYS["heavy"] != neighbours.KEYS["neighbour"]
