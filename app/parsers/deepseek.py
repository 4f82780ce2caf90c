"""Tool calls of DeepSeek-V3, R1 and V3.1: special markers around name and arguments; V3 fences the latter as JSON."""

from __future__ import annotations

from collections.abc import Collection

from app.parsers.base import ToolParser
from app.parsers.grammar import CallGrammar
from app.parsers.json_text import begin_call
from app.parsers.scanner import MAX_NAME, Mismatch, Steps

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


class DeepSeekV31Parser(ToolParser):
    """V3.1: name, separator, arguments."""

    markers = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)

    def parse(self) -> Steps[None]:
        """Content, then calls between their markers."""
        scan = self.scan
        closing: tuple[str, ...] = ()
        while marker := (yield from scan.content(CALLS, CALL, *closing)):
            if marker == CALL and (yield from scan.attempt(self._call(), CALL)):
                closing = (CALL_END, CALLS_END)
                yield from self._end()

    def _call(self) -> Steps[None]:
        name, _ = yield from self.scan.until(SEPARATOR, limit=MAX_NAME)
        yield from begin_call(self.scan, name.strip())

    def _end(self) -> Steps[None]:
        yield from self.scan.accept(CALL_END)

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """All calls inside one pair of markers."""
        return CallGrammar(f"{CALL}{{name}}{SEPARATOR}", CALL_END, begin=CALLS, end=CALLS_END, trigger=CALLS)


class DeepSeekV3Parser(DeepSeekV31Parser):
    """V3 and R1: `function`, separator, name, arguments in a fenced block."""

    def _call(self) -> Steps[None]:
        scan = self.scan
        kind, _ = yield from scan.until(SEPARATOR, limit=MAX_NAME)
        if kind.strip() != "function":
            raise Mismatch
        name, _ = yield from scan.until("\n", limit=MAX_NAME)
        if (yield from scan.accept(FENCE)):
            yield from scan.match("json")
        yield from begin_call(scan, name.strip())

    def _end(self) -> Steps[None]:
        yield from self.scan.accept(FENCE)
        yield from super()._end()

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """All calls inside one pair of markers, a new line between them."""
        before, after = f"{CALL}function{SEPARATOR}{{name}}\n{FENCE}json\n", f"\n{FENCE}{CALL_END}"
        return CallGrammar(before, after, begin=CALLS, separator="\n", end=CALLS_END, trigger=CALLS)
