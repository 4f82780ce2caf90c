"""Tool calls of Llama 3.x: {"name": ..., "parameters": {...}}, with or without <|python_tag|> before it.

Without the tag an answer is a call only if it begins with one and names an offered tool, since such a model may also
answer in JSON. Several calls are separated by semicolons.
"""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar
from app.parsers.json_text import json_call
from app.parsers.scanner import Steps

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Llama 3.1, 3.2 and 3.3."""

    markers = (TAG,)

    def parse(self) -> Steps[None]:
        """Calls if the answer begins with them, or after the tag; all else is content."""
        scan = self.scan
        scan.gap = yield from scan.space()
        if (yield from scan.peek()) == "{":
            yield from self._calls()
        else:
            scan.say_content(scan.gap)
        while (yield from scan.content(TAG)):
            # What the tag announces may be code for a built-in tool: content, without the tag.
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        scan = self.scan
        while (yield from scan.attempt(json_call(scan, self.tools), "")):
            if not (yield from scan.accept(";")):
                yield from scan.accept(",")
            yield from scan.space()
            if (yield from scan.peek()) != "{":
                return

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """One JSON object; several are separated by a semicolon."""
        return CallGrammar('{"name": "{name}", "parameters": ', "}", separator="; ", trigger="{", is_first=True)
