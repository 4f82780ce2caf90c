"""Short lines of a batch: a text, or JSON of a `prompt` or of `messages`, in place of OpenAI's batch format.

A JSON line may have an `id`, which comes back as `custom_id` (else `line-N` does, for line N), and any field of the
endpoint that answers it: /v1/completions for a prompt, /v1/chat/completions for messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from app.api.batches.lines import BadLine, BatchRequest, batch_request, members, parse_line

ENDPOINTS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
BATCH_FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True, slots=True)
class LineReader:
    """Reads short lines and those of OpenAI's format. `as_chat`: a text is a user's message, not the beginning of a
    text to go on with. `sampling`: parameters of short lines, where they bring none of their own."""

    as_chat: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def read(self, number: int, raw: bytes) -> BatchRequest | BadLine:
        """One line, numbered from 1; it must not be empty."""
        try:
            entry = self._members(raw.decode().strip())
        except (ValueError, RecursionError):
            return parse_line(number, raw)  # which says what is wrong
        if not BATCH_FIELDS.isdisjoint(entry):
            return parse_line(number, raw)
        return self._expand(number, entry, len(raw))

    def _members(self, text: str) -> dict[str, msgspec.Raw]:
        if text.startswith("{"):
            return members(text.encode())
        said = msgspec.json.decode(text, type=str) if text.startswith('"') else text
        return _raw({"messages": [{"role": "user", "content": said}]} if self.as_chat else {"prompt": said})

    def _expand(self, number: int, entry: dict[str, msgspec.Raw], num_bytes: int) -> BatchRequest | BadLine:
        own = msgspec.json.decode(entry.pop("id", b'"line-%d"' % number))
        given = [name for name in ENDPOINTS if bytes(entry.get(name, b"null")) != b"null"]
        if len(given) != 1:
            return BadLine(number, None, "give a custom_id, method, url and body, or either prompt or messages")
        request = {
            "custom_id": str(own) if isinstance(own, int) else own,
            "method": "POST",
            "url": ENDPOINTS[given[0]],
            "body": {**self.sampling, **entry},
        }
        return batch_request(number, _raw(request), num_bytes)


def _raw(entry: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in entry.items()}
