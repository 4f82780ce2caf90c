"""Reads the chunks of one streamed chat completion into a record, and says what a broken stream lacks."""

from __future__ import annotations

import json
from typing import Any

from loadtest.record import AnswerRecord


class BrokenAnswerError(Exception):
    """The stream did not hold a whole answer."""


class AnswerReader:
    """Takes the data of each server-sent event with the time it came; `begin` is on the same clock, in seconds."""

    def __init__(self, record: AnswerRecord, begin: float) -> None:
        self._record = record
        self._begin = begin
        self._last = begin
        self._texts: list[str] = []
        self._found = {"finish reason": False, "usage": False, "[DONE]": False}

    def push(self, data: bytes, now: float) -> None:
        """Take one event; BrokenAnswerError when it is an error or no chunk at all."""
        if data == b"[DONE]":
            self._found["[DONE]"] = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise BrokenAnswerError(f"error in the stream: {chunk['error'].get('message', chunk['error'])}")
            if (usage := chunk.get("usage")) is not None:
                self._take_usage(usage)
            for choice in chunk["choices"]:
                self._take_choice(choice, now)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenAnswerError(
                f"not a chunk ({type(error).__name__}): {data[:100].decode(errors='replace')}"
            ) from error

    def finish(self) -> str:
        """The whole text; BrokenAnswerError names what has not come."""
        if missing := [name for name, found in self._found.items() if not found]:
            raise BrokenAnswerError(f"the stream ended without {', '.join(missing)}")
        return "".join(self._texts)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self._found["usage"] = True
        self._record.num_prompt_tokens = usage["prompt_tokens"]
        self._record.num_output_tokens = usage["completion_tokens"]
        self._record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        if choice.get("finish_reason") is not None:
            self._found["finish reason"] = True
        delta = choice["delta"]
        content = delta.get("content")
        if content:
            self._texts.append(content)
        elif not (delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")):
            return  # the role that opens the stream, or the finish reason that ends it
        if self._record.ttft_s is None:
            self._record.ttft_s = now - self._begin
        else:
            self._record.gaps_s.append(now - self._last)
        self._last = now
