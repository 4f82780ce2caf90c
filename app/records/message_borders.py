"""Says of a request where the messages of its prompt end: other prompts are likely to go on from there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class MessageBorders:
    """Counts of leading tokens, ascending. The first is behind what conversations begin with alike: the system prompt
    and the tools."""

    tokens: tuple[int, ...]
