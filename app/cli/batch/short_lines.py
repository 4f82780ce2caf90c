"""Short lines of a batch: a text, or JSON of a `prompt` or of `messages`, in place of OpenAI's batch format.

A JSON line may have an `id`, which comes back as `custom_id` (else the line's number does), and any field of the
endpoint that answers it: /v1/completions for a prompt, /v1/chat/completions for messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.batches.lines import BadLine, BatchRequest, batch_request, parse_line

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
            text = raw.decode().strip()
            entry = json.loads(text) if text.startswith(("{", '"')) else text
        except (ValueError, RecursionError):
            return parse_line(number, raw)  # which says what is wrong
        if isinstance(entry, str):
            entry = {"messages": [{"role": "user", "content": entry}]} if self.as_chat else {"prompt": entry}
        elif not BATCH_FIELDS.isdisjoint(entry):
            return batch_request(number, entry, len(raw))
        return self._expand(number, entry, len(raw))

    def _expand(self, number: int, entry: dict[str, Any], num_bytes: int) -> BatchRequest | BadLine:
        own = entry.pop("id", number)
        given = [name for name in ENDPOINTS if entry.get(name) is not None]
        if len(given) != 1:
            return BadLine(number, None, "give a custom_id, method, url and body, or either prompt or messages")
        request = {
            "custom_id": str(own) if isinstance(own, int) else own,
            "method": "POST",
            "url": ENDPOINTS[given[0]],
            "body": {**self.sampling, **entry},
        }
        return batch_request(number, request, num_bytes)
