"""Tool calls in the Hermes form: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, mixed with plain text."""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar
from app.parsers.json_text import json_call
from app.parsers.scanner import Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Hermes, Qwen2.5, Qwen3 and tiny-chat."""

    markers = (OPEN, CLOSE)

    def parse(self) -> Steps[None]:
        """Content and calls, in any order."""
        scan = self.scan
        closing: tuple[str, ...] = ()  # the end of a call that was read belongs to it, wherever it comes
        while marker := (yield from scan.content(OPEN, *closing)):
            if marker == CLOSE:
                closing = ()
            elif (yield from scan.attempt(json_call(scan), OPEN)):
                closing = (CLOSE,)
                while (yield from scan.accept("}")):  # models close brackets once too often
                    pass
                if (yield from scan.match(CLOSE)):
                    closing = ()

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """One line of JSON between the markers."""
        before, after = f'{OPEN}\n{{"name": "{{name}}", "arguments": ', f"}}\n{CLOSE}"
        return CallGrammar(before, after, separator="\n", trigger=OPEN)
