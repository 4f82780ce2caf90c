"""Short lines become the requests of OpenAI's batch format that they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.api.batches.lines import BadLine, BatchRequest
from app.cli.batch.short_lines import LineReader

SAMPLING = {"temperature": 0.5, "max_tokens": 7}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def read(line: str, as_chat: bool = False) -> BatchRequest | BadLine:
    return LineReader(as_chat, SAMPLING).read(3, line.encode())


@pytest.mark.parametrize(
    ("line", "as_chat", "custom_id", "url", "body"),
    [
        ("Hello\n", False, "line-3", COMPLETIONS, {"prompt": "Hello", **SAMPLING}),
        ("Hello\r\n", True, "line-3", CHAT, {"messages": HELLO, **SAMPLING}),
        ('"a\\nb"', False, "line-3", COMPLETIONS, {"prompt": "a\nb", **SAMPLING}),
        ('{"prompt": [5, 6], "id": 0, "max_tokens": 1}', True, "0", COMPLETIONS,
         {"prompt": [5, 6], "temperature": 0.5, "max_tokens": 1}),
        ('{"messages": [{"role": "user", "content": "Hello"}], "id": "x"}', False, "x", CHAT,
         {"messages": HELLO, **SAMPLING}),
        (json.dumps({"custom_id": "c", "method": "POST", "url": CHAT, "body": {"messages": HELLO}}), True, "c", CHAT,
         {"messages": HELLO}),
    ],
)  # fmt: skip
def test_what_a_line_asks(line: str, as_chat: bool, custom_id: str, url: str, body: dict[str, Any]) -> None:
    found = read(line, as_chat)
    assert isinstance(found, BatchRequest), found
    assert (found.number, found.custom_id, found.url, json.loads(found.body)) == (3, custom_id, url, body)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": "a"', "no JSON"),
        ('{"prompt": "a", "id": [1]}', "custom_id: expected a text"),
        ('{"prompt": "a", "stream": true}', "a batch has no streams"),
        ('{"custom_id": "a", "prompt": "a"}', "prompt: unknown field"),
    ],
)
def test_a_wrong_line_is_told(line: str, says: str) -> None:
    found = read(line)
    assert isinstance(found, BadLine)
    assert says in found.message


def test_a_line_that_is_no_text() -> None:
    assert isinstance(LineReader().read(1, b"\xff\xfe"), BadLine)


def test_the_id_of_a_line_without_one_is_no_number() -> None:
    """A file may number its own lines: `1` is then somebody else's."""
    first, second = LineReader().read(1, b"Hello"), LineReader().read(2, b'{"prompt": "a", "id": "1"}')
    assert isinstance(first, BatchRequest)
    assert isinstance(second, BatchRequest)
    assert first.custom_id != second.custom_id
