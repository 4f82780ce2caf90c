"""Defines what a parser of generated text is: one choice's text in, parts of an answer out.

A parser is fed with the text as it comes, so a streamed answer and a collected one go through the same code and agree:
the parts of the whole are the parts of its pieces, joined.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from app.parsers.grammar import CallGrammar
from app.parsers.scanner import Part, Scanner, Steps

Schema = Mapping[str, Any]  # a JSON schema
ToolSchemas = Mapping[str, Schema]  # name of an offered tool -> schema of its arguments
NO_TOOLS: ToolSchemas = MappingProxyType({})


class Parser(ABC):
    """Parses one choice: fed with text, it returns what has become certain."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Take more text; return what is now certain."""

    @abstractmethod
    def flush(self) -> list[Part]:
        """The text has ended: return what was held."""


class FormatParser(Parser):
    """A parser of one format. `parse` is written as if all text were there; the scanner suspends it where it is not.

    Text whose meaning is open waits. Nothing is lost and nothing raises, whatever the model writes: what is not in the
    parser's format is content.
    """

    # Markers that must survive detokenisation, even where the tokenizer calls them special.
    markers: tuple[str, ...] = ()

    def __init__(self, tools: ToolSchemas = NO_TOOLS) -> None:
        self.tools = tools
        self.scan = Scanner()
        self._steps: Steps[None] | None = self.parse()

    @abstractmethod
    def parse(self) -> Steps[None]:
        """Parse `self.scan` to its end."""

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is now certain."""
        if self._steps is None:  # it has read all it knows: the rest is content
            return [Part("content", text)] if text else []
        self.scan.feed(text)
        return self._resume()

    def flush(self) -> list[Part]:
        """The text has ended: return what was held."""
        self.scan.ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
                self.scan.say_content(self.scan.take_rest())
        return self.scan.take_parts()


class ToolParser(FormatParser):
    """A parser that finds tool calls, and how its format is enforced."""

    writes_text: ClassVar[bool] = False  # arguments that are strings stand in a call as they are, not as JSON

    @classmethod
    @abstractmethod
    def call_grammar(cls, special: Collection[str]) -> CallGrammar:
        """Says how a model writes calls in this format, by which they are enforced.

        `special` are the markers that are tokens of their own in the model's vocabulary.
        """

    @classmethod
    def new_call_id(cls) -> str:
        """An id for a call, unique."""
        return f"call_{uuid.uuid4().hex[:24]}"


class ReasoningParser(FormatParser):
    """A parser that tells reasoning from the answer. Its content is what a tool parser reads."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside  # whether the text begins inside the reasoning

    @classmethod
    @abstractmethod
    def starts_inside(cls, prompt_end: str, continued: str | None) -> bool:
        """True if an answer to a prompt that ends so begins inside the reasoning.

        `prompt_end` is the text of the prompt's last tokens; `continued` the text of the assistant's message, where
        the answer continues one.
        """

    @classmethod
    @abstractmethod
    def reasoning_markers(cls) -> tuple[str, str]:
        """Returns what opens reasoning and what closes it, in an answer."""

    @classmethod
    @abstractmethod
    def reasoning_end(cls, inside: bool) -> str:
        """The text after which a structured output begins; "" when it begins at once."""

    @classmethod
    def may_open(cls, prompt_end: str, continued: str | None) -> str:
        """The marker with which the answer itself may open reasoning; "" where it is open already, closed, or marked
        in another way. Arguments as for `starts_inside`."""
        return ""


@dataclass(slots=True)
class ParsedCall:
    """One complete call. `arguments` is JSON text, as the OpenAI dialect sends it."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The parts of one choice, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts in their order."""
        reasoning, content = [self.reasoning], [self.content]
        for part in parts:
            match part.kind:
                case "reasoning":
                    reasoning.append(part.text)
                case "content":
                    content.append(part.text)
                case "call":
                    self.calls.append(ParsedCall(part.text))
                case "arguments":  # a parser joins those that it finds at a time
                    self.calls[-1].arguments += part.text
        self.reasoning, self.content = "".join(reasoning), "".join(content)
