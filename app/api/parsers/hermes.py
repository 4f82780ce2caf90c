"""Tool calls in the Hermes form: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, mixed with plain text.

A call is reported once, whole, when its closing marker has come. What looks like a call but is not valid JSON stays
plain content, markers and all: nothing the model wrote is lost.
"""

from __future__ import annotations

import json

from app.api.parsers.base import ParsedCall, ParsedText, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Hermes, Qwen2.5, Qwen3 and tiny-chat."""

    markers = (OPEN, CLOSE)

    def __init__(self) -> None:
        self._held = ""  # text whose meaning is open
        self._gap = ""  # white space before the call that is held; it belongs to the call
        self._any_call = False

    def push(self, text: str) -> ParsedText:
        """Take more text; return what is now certain."""
        self._held += text
        parsed = ParsedText()
        while self._take(parsed):
            pass
        return parsed

    def flush(self) -> ParsedText:
        """The text has ended: an unclosed call counts if its JSON is whole."""
        parsed = ParsedText()
        if self._held.startswith(OPEN):
            self._take_call(self._held, len(OPEN), len(self._held), parsed)
        else:
            parsed.content = self._held.rstrip() if self._any_call else self._held
        self._held = ""
        return parsed

    def _take(self, parsed: ParsedText) -> bool:
        """Move what is certain from the held text to `parsed`; True when there may be more."""
        if self._held.startswith(OPEN):
            end = self._held.find(CLOSE)
            if end < 0:
                return False
            call, self._held = self._held[: end + len(CLOSE)], self._held[end + len(CLOSE) :]
            self._take_call(call, len(OPEN), end, parsed)
            return True
        start = self._held.find(OPEN)
        if start >= 0:
            content = self._held[:start].rstrip()
            parsed.content += content
            self._gap = self._held[len(content) : start]
            self._held = self._held[start:]
            return True
        keep = _undecided(self._held)
        parsed.content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _take_call(self, text: str, start: int, end: int, parsed: ParsedText) -> None:
        call = _parse_call(text[start:end])
        if call is None:
            parsed.content += self._gap + text
        else:
            self._any_call = True
            parsed.calls.append(call)


def _undecided(text: str) -> int:
    """Length of the end of `text` that may belong to a call: white space, and a beginning of the marker."""
    length = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())


def _parse_call(text: str) -> ParsedCall | None:
    try:
        call = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ParsedCall(call["name"], arguments)
