"""What clients send back of a conversation may carry more than they were given; what they ask for may not."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest

from app.text.tokenizer import Tokenizer

EXTRA: dict[str, Any] = {
    "provider_specific_fields": {"citations": None},
    "cache_control": {"type": "ephemeral", "ttl": "unheard of"},
    "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
    "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}],
    "annotations": [],
    "citations": [{"type": "char_location"}],
    "index": 0,
    "created_by": "a library",
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ],
    "max_tokens": 3,
}
MESSAGES: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1 + 2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]}],
        },
    ],
    "model": "m",
    "max_tokens": 3,
}
RESPONSES: dict[str, Any] = {
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
    ],
    "max_output_tokens": 3,
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}


def decorated(value: Any, is_argument: bool = False) -> Any:
    """The same history with unknown fields in every object of it that the dialect defines."""
    if isinstance(value, list):
        return [decorated(item) for item in value]
    if not isinstance(value, dict) or is_argument:
        return value
    return {name: decorated(item, name == "input") for name, item in value.items()} | EXTRA


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_of_the_history_are_ignored(
    http: httpx.Client, client: Any, served_model: Any, path: str
) -> None:
    history = "input" if "input" in BODIES[path] else "messages"
    plain = copy.deepcopy(BODIES[path])
    dressed = {**plain, history: decorated(plain[history])}
    for body in (plain, dressed):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
    first, second = (request.prompt_token_ids for request in client.requests[-2:])
    assert first == second
    tokenizer: Tokenizer = served_model.tokenizer
    assert '"a": 1' in tokenizer.decode(second, skip_special_tokens=False)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_asked_for_stays_closed_but_on_agents_routes(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={**BODIES[path], "cache_controls": {}})
    if path in ("/v1/messages", "/v1/responses"):
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    assert "unknown field 'cache_controls'" in answer.json()["error"]["message"]


def test_tokenize_and_count_tokens_take_the_same_history(http: httpx.Client) -> None:
    fields = {"messages": decorated(CHAT["messages"])}
    tokens = http.post("/tokenize", json=fields).json()["tokens"]
    assert tokens == http.post("/tokenize", json={"messages": CHAT["messages"]}).json()["tokens"]
    counted = [
        http.post("/v1/messages/count_tokens", json={"model": "m", "messages": messages}).json()
        for messages in (MESSAGES["messages"], decorated(MESSAGES["messages"]))
    ]
    assert counted[0] == counted[1]
