"""The harmony form of gpt-oss: messages on channels, <|channel|>NAME<|message|>TEXT<|end|>.

`analysis` is the reasoning, `final` the answer, `commentary` either a preamble, which is content, or, with a recipient
`to=functions.NAME`, a tool call. Reasoning and calls share one form, so one parser finds both.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from app.parsers.base import NO_TOOLS, ReasoningParser, ToolParser, ToolSchemas
from app.parsers.grammar import CallGrammar, Lark
from app.parsers.scanner import Mismatch, PartKind, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
MAX_HEADER = 512  # characters between two messages' texts
_TO = r"(?:\s*+to=[^\s<]++)?"
# What was matched is not given back (`*+`): several runs of white space in a row would share one in all ways there are.
_HEADER = re.compile(
    rf"(?:<\|start\|>)?(?:assistant)?{_TO}(?:\s*+<\|channel\|>\s*+\w++)?{_TO}"
    r"\s*+(?:<\|constrain\|>)?\s*+(?:json|code)?\s*+"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyParser(ToolParser):
    """gpt-oss."""

    markers = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL)

    def __init__(self, tools: ToolSchemas = NO_TOOLS, *, finds_calls: bool = True) -> None:
        self._finds_calls = finds_calls
        self._has_text = False  # whether content has been said, from which more must be set off
        self._header = ""
        super().__init__(tools)

    def parse(self) -> Steps[None]:
        """One message after another; text outside of any is content."""
        scan = self.scan
        while (yield from scan.peek()):
            if (yield from scan.attempt(self._read_header(), "")):
                yield from self._message()
            else:
                yield from self._plain()

    def _read_header(self) -> Steps[None]:
        """Reads what stands before the next message's text."""
        scan = self.scan
        yield from scan.space()
        marker = yield from scan.match(START, CHANNEL, MESSAGE, "assistant", "to=")
        if not marker:
            raise Mismatch
        text = ""
        if marker != MESSAGE:
            text, _ = yield from scan.until(MESSAGE, limit=MAX_HEADER)
        self._header = marker + text
        if marker != MESSAGE and not _HEADER.fullmatch(self._header):
            raise Mismatch

    def _plain(self) -> Steps[None]:
        """Content up to where a message may begin again; markers that stand alone say nothing."""
        scan = self.scan
        yield from scan.match(*self.markers)
        marker = yield from scan.pass_until(self.markers, scan.say_content)
        if marker in (START, CHANNEL, MESSAGE):
            scan.back(len(marker))

    def _message(self) -> Steps[None]:
        scan = self.scan
        recipient = _RECIPIENT.search(self._header)
        channel = _CHANNEL.search(self._header)
        kind: PartKind = "reasoning" if channel and channel.group(1) == "analysis" else "content"
        if recipient and self._finds_calls:
            kind = self._begin(recipient.group(1))
        if kind == "content" and self._has_text:
            scan.say_content("\n\n")
        self._has_text |= kind == "content"
        # A message that was not closed ends where the next one begins.
        marker = yield from scan.pass_until((END, RETURN, CALL, START), lambda text: scan.say(kind, text))
        if marker == START:
            scan.back(len(START))

    def _begin(self, name: str) -> PartKind:
        """The kind of what follows: a call's arguments, unless the recipient cannot be a function."""
        try:
            self.scan.begin_call(name)
        except Mismatch:
            return "content"
        return "arguments"

    @classmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """One call, after reasoning if there is any; the token <|call|> ends the answer."""
        before = f"{CHANNEL}commentary to=functions.{{name}} {CONSTRAIN}json{MESSAGE}"
        return CallGrammar(before, "", lead=_lead, is_single=True)


def _lead(lark: Lark) -> str:
    """Reasoning, which may come before the call."""
    begin, end = lark.literal(f"{CHANNEL}analysis{MESSAGE}"), lark.literal(f"{START}assistant")
    return f"({begin} {lark.text_before(END)} {end})?"


class HarmonyReasoningParser(ReasoningParser):
    """The reasoning alone, for an answer that may not call tools: what the model calls all the same is content."""

    markers = HarmonyParser.markers

    def __init__(self, inside: bool = False) -> None:
        self._parser = HarmonyParser(finds_calls=False)
        super().__init__(inside)
        self._parser.scan = self.scan

    def parse(self) -> Steps[None]:
        """Parse as the parser of the whole form does."""
        yield from self._parser.parse()

    @classmethod
    def starts_inside(cls, prompt_end: str, continued: str | None) -> bool:
        """Never: every message says on which channel it is."""
        return False

    @classmethod
    def reasoning_markers(cls) -> tuple[str, str]:
        """The header of a message on the analysis channel, and the end of a message."""
        return f"{CHANNEL}analysis{MESSAGE}", END

    @classmethod
    def reasoning_end(cls, inside: bool) -> str:
        """The answer proper is what the final channel says."""
        return f"{CHANNEL}final{MESSAGE}"
