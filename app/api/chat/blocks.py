"""An answer as a row of blocks (reasoning, texts, calls), for the dialects that show it so: Anthropic's and responses.

Parts that a parser finds become changes of blocks: one opens, grows and closes before the next opens. A stream writes
the changes; a collected answer is the blocks that they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from app.api.generation.events import Choice, EventStream
from app.parsers.scanner import Part
from app.records.step import TokenLogprobs
from app.text.growing_text import GrowingText
from app.text.output_processor import TextDelta

BlockKind = Literal["reasoning", "text", "call"]
_KINDS: dict[str, BlockKind] = {"reasoning": "reasoning", "content": "text", "call": "call"}


class TextParser(Protocol):
    """Finds reasoning and calls in one choice's text (app/parsers)."""

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is now certain, in order."""
        ...

    def flush(self) -> list[Part]:
        """The text has ended: return what was held."""
        ...


@dataclass(slots=True)
class ContentBlock:
    """One block of an answer."""

    kind: BlockKind
    index: int
    name: str = ""  # a call's function
    said: GrowingText = field(default_factory=GrowingText)
    is_cut: bool = False  # the answer reached its limit inside the block
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # a text's, where they were asked for

    @property
    def text(self) -> str:
        """The text that was reasoned or said; for a call, its arguments as JSON text."""
        return str(self.said)


@dataclass(slots=True)
class BlockChange:
    """One step in the life of a block; `text` is what a `grow` added."""

    step: Literal["open", "grow", "close"]
    block: ContentBlock
    text: str = ""
    num_logprobs: int = 0  # how many of the block's logprobs came with the text


class BlockReader:
    """One choice's blocks as its text comes. Calls beyond `max_calls` are not shown.

    White space alone makes no block: it waits until something is said, and is dropped where nothing is.
    """

    def __init__(self, parser: TextParser | None, max_calls: int | None = None) -> None:
        self.blocks: list[ContentBlock] = []
        self.finish: TextDelta | None = None  # the last delta, once it has come
        self._parser = parser
        self._max_calls = max_calls
        self._is_open = False
        self.num_calls = 0  # that are shown
        self._has_reasoned = False
        self._space = GrowingText()  # that waits until something of its kind is said
        self._space_kind: BlockKind = "text"
        self._num_early_tokens = 0
        self._logprobs: list[TokenLogprobs] = []  # those of tokens whose text the parser still holds
        self._has_answered = False

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before the answer, where there is reasoning: the reasoning and its markers."""
        return self._num_early_tokens if self._has_reasoned else 0

    def read(self, delta: TextDelta) -> list[BlockChange]:
        """Returns what one delta changes; the last one closes what is open."""
        parts = self._parse(delta)
        self._has_answered = self._has_answered or any(p.kind != "reasoning" and p.text.strip() for p in parts)
        if not self._has_answered:
            self._num_early_tokens += len(delta.token_ids)
        changes = self._add(parts)
        self._place_logprobs(delta, changes)
        if delta.finish_reason is not None:
            self.finish = delta
            if self._is_open:
                self.blocks[-1].is_cut = delta.finish_reason == "length"
            changes += self._close()
        return changes

    def _place_logprobs(self, delta: TextDelta, changes: Iterable[BlockChange]) -> None:
        """Tokens belong to the text that they bring; those of markers, reasoning and calls to none."""
        self._logprobs += delta.logprobs or ()
        grown = [change for change in changes if change.step == "grow"]
        if not grown or not self._logprobs:
            return
        said = next((change for change in grown if change.block.kind == "text"), None)
        if said is not None:
            said.num_logprobs = len(self._logprobs)
            said.block.logprobs += self._logprobs
        self._logprobs = []

    def _parse(self, delta: TextDelta) -> Sequence[Part]:
        if self._parser is None:
            return [Part("content", delta.text)] if delta.text else []
        parts = self._parser.push(delta.text) if delta.text else []
        return [*parts, *self._parser.flush()] if delta.finish_reason is not None else parts

    def _add(self, parts: Iterable[Part]) -> list[BlockChange]:
        changes: list[BlockChange] = []
        for part in parts:
            if part.kind == "arguments":
                changes += self._grow(part.text) if self._is_open else []
            elif part.kind == "call":
                changes += self._close()
                if self._max_calls is None or self.num_calls < self._max_calls:
                    changes += self._open("call", part.text)
            else:
                changes += self._say(_KINDS[part.kind], part.text)
        return changes

    def _say(self, kind: BlockKind, text: str) -> list[BlockChange]:
        changes: list[BlockChange] = []
        if not self._is_open or self.blocks[-1].kind != kind:
            if self._is_open or self._space_kind != kind:
                changes += self._close()
            self._space_kind = kind
            self._space.add(text)
            if not text.strip():
                return changes
            text = str(self._space)
            changes += self._open(kind)
        return changes + self._grow(text)

    def _open(self, kind: BlockKind, name: str = "") -> list[BlockChange]:
        block = ContentBlock(kind, len(self.blocks), name)
        self.blocks.append(block)
        self.num_calls += kind == "call"
        self._has_reasoned |= kind == "reasoning"
        self._is_open = True
        self._space.clear()
        return [BlockChange("open", block)]

    def _grow(self, text: str) -> list[BlockChange]:
        self.blocks[-1].said.add(text)
        return [BlockChange("grow", self.blocks[-1], text)]

    def _close(self) -> list[BlockChange]:
        if not self._is_open:
            self._space.clear()
            return []
        self._is_open = False
        return [BlockChange("close", self.blocks[-1])]


async def read_blocks(stream: EventStream, reader: BlockReader) -> Choice:
    """Read a stream of one choice to its end. Raises what the engine raised."""
    async with stream:
        while batch := await stream.next_batch():
            for _, delta in batch:
                reader.read(delta)
    return stream.choices[0]
