"""Documents of text in /v1/messages, and edits of the context."""

from __future__ import annotations

import base64
from typing import Any

import anthropic
import httpx
import pytest

TEXT = "Foxes are quick."
SOURCES: list[dict[str, Any]] = [
    {"type": "text", "media_type": "text/plain", "data": TEXT},
    {"type": "base64", "media_type": "text/plain", "data": base64.b64encode(TEXT.encode()).decode()},
    {"type": "content", "content": TEXT},
    {"type": "content", "content": [{"type": "text", "text": TEXT}]},
]


def body(*blocks: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": list(blocks)}], **fields}


@pytest.mark.parametrize("source", SOURCES)
def test_a_document_of_text_is_shown(claude: anthropic.Anthropic, prompt_of: Any, source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source, "title": "Animals", "context": "A book.", "citations": None}
    question = {"type": "text", "text": "Who?"}
    claude.messages.create(**body(document, question))
    shown = f"<document>\nTitle: Animals\nContext: A book.\n{TEXT}\n</document>\nWho?<|im_end|>"
    assert shown in prompt_of()
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document", "source": source}]}
    turns: Any = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    claude.messages.create(model="m", max_tokens=5, messages=turns)
    assert f"<|im_start|>tool\n<document>\n{TEXT}\n</document>" in prompt_of()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}, "application/pdf"),
        ({"source": {"type": "url", "url": "http://x/y.pdf"}}, "source url"),
        ({"source": {"type": "file", "file_id": "f"}}, "source file"),
        ({"source": {"type": "base64", "media_type": "text/plain", "data": "@"}}, "base64"),
        ({"source": {"type": "base64", "media_type": "text/plain", "data": "/w=="}}, "UTF-8"),
        ({"source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}, "citations"),
        ({"source": {}}, "source"),
        ({}, "source"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/messages", json=body({"type": "document", **fields}))
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_edits_that_change_nothing_are_taken(http: httpx.Client) -> None:
    text = {"type": "text", "text": "hi"}
    for edits in ([], [{"type": "clear_thinking_20251015", "keep": "all"}]):
        answer = http.post("/v1/messages", json=body(text, context_management={"edits": edits}))
        assert answer.status_code == 200, answer.text
    keep_all = {"type": "clear_thinking_20251015", "keep": {"type": "all"}}
    assert http.post("/v1/messages", json=body(text, context_management={"edits": [keep_all]})).status_code == 200
    wrong: Any
    for wrong in (
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
        {"type": "clear_tool_uses_20250919"},
        {"type": "compact_20260112"},
    ):
        answer = http.post("/v1/messages", json=body(text, context_management={"edits": [wrong]}))
        assert answer.status_code == 400
        assert wrong["type"] in answer.json()["error"]["message"]
