"""The chunks of a chat that is to be kept: what they say is gathered, and kept before the last finish is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from app.api.chat.conversation import Conversation
from app.api.generation.events import Choice, Collected, Event
from app.api.openai.chat_answer import SaidChoice
from app.api.openai.chat_store import ChatKeeper
from app.api.openai.chunks import ChatChunks, OutputOptions
from app.parsers.base import ParsedAnswer
from app.parsers.scanner import Part
from app.records.outputs import CompletionOutput
from app.text.output_processor import TextDelta


class KeptChunks(ChatChunks):
    """The same chunks as without keeping; the last finish waits for the store, and says whether the chat is kept."""

    def __init__(
        self, conversation: Conversation, options: OutputOptions, keeper: ChatKeeper, calls_reason: str = "tool_calls"
    ) -> None:
        super().__init__(conversation, options, calls_reason)
        self._keeper = keeper
        choices = conversation.stream.choices
        self._collected = [Collected(choice, CompletionOutput(choice.index)) for choice in choices]
        self._parts: list[list[Part]] = [[] for _ in choices]
        self._num_open = len(choices)
        self._last: Event | None = None  # that ended the last choice
        self._is_kept = False

    def event(self, event: Event) -> str:
        """Reasoning, text, calls and finish of one engine output."""
        choice, delta = event
        delta.add_to(self._collected[choice.index].output)
        return super().event(event)

    def _parse(self, choice: Choice, delta: TextDelta) -> list[Part]:
        parts = super()._parse(choice, delta)
        self._parts[choice.index] += parts
        return parts

    async def finish(self) -> None:
        """Keep what was said."""
        said = []
        for entry, parts, call_ids in zip(self._collected, self._parts, self._call_ids, strict=True):
            answer = ParsedAnswer()
            answer.add(_joined(parts))
            said.append(SaidChoice(entry, answer, call_ids))
        self._is_kept = await self._keeper.keep_choices(said)

    def end(self) -> str:
        """The last finish, then the end of any stream."""
        told = super()._finish(*self._last, store=self._is_kept) if self._last is not None else ""
        return told + super().end()

    def _finish(self, choice: Choice, delta: TextDelta, **envelope: Any) -> str:
        self._num_open -= 1
        if self._num_open:
            return super()._finish(choice, delta, **envelope)
        self._last = choice, delta
        return ""


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The same with neighbours of one kind as one part: the pieces of a long text are joined once."""
    for kind, group in groupby(parts, key=lambda part: part.kind):
        if kind == "call":
            yield from group
        else:
            yield Part(kind, "".join(part.text for part in group))
