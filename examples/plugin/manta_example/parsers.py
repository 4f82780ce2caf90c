"""Models that call a tool as `@name {json}@` and think as `hmm: ... :hmm`."""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar
from app.parsers.scanner import MAX_NAME, Steps
from app.parsers.think import ThinkParser

OPEN, CLOSE = "@", "}@"
MAX_ARGUMENTS = 1 << 16  # characters of a call: what is longer is content


class AtParser(ToolParser):
    """Calls between at signs."""

    markers = (OPEN,)

    def parse(self) -> Steps[None]:
        """See FormatParser."""
        while (yield from self.scan.content(OPEN)):
            name, _ = yield from self.scan.until(" ", limit=MAX_NAME)
            arguments, _ = yield from self.scan.until(CLOSE, limit=MAX_ARGUMENTS)
            self.scan.begin_call(name)
            self.scan.say_arguments(arguments + "}")

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """How such a call is enforced."""
        return CallGrammar("@{name} ", "@", separator=" ", trigger=OPEN)


class HmmParser(ThinkParser):
    """Reasoning between these words."""

    open, close = "hmm:", ":hmm"
    markers = (open, close)
