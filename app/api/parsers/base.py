"""What a parser of tool calls is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field


@dataclass(slots=True)
class ParsedCall:
    """One complete call. `arguments` is JSON text, as the OpenAI dialect sends it."""

    name: str
    arguments: str


@dataclass(slots=True)
class ParsedText:
    """What a piece of text turned out to be: plain content, then calls."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


class ToolParser(ABC):
    """Finds the calls in one choice's text. Text that may begin a call waits until that is decided."""

    # Markers that must survive detokenisation, even where the tokenizer calls them special.
    markers: tuple[str, ...] = ()

    @abstractmethod
    def push(self, text: str) -> ParsedText:
        """Take more text; return what is now certain."""

    @abstractmethod
    def flush(self) -> ParsedText:
        """The text has ended: return what was held."""
