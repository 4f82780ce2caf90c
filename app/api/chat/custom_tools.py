"""Custom tools of the OpenAI dialect: tools that take a text, free or of a grammar, instead of JSON arguments."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from app.api.chat.call_arguments import Arguments, FunctionName
from app.api.http.strict_models import History, StrictModel
from app.bounds import Text
from app.parsers.custom_input import INPUT, InputGrammar, enforced_schema, input_schema


class GrammarDefinition(StrictModel):
    """A grammar, and in which notation it is written."""

    syntax: Literal["lark", "regex"]
    definition: Text = Field(min_length=1, description="Lark, or a regular expression that the whole text matches.")


class CustomFormat(StrictModel):
    """Says what the text looks like."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = Field(None, description="With type grammar.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("a grammar belongs to type 'grammar', and only to it")
        return self


class CustomDefinition(StrictModel):
    """Says what a custom tool does and takes."""

    name: FunctionName
    description: Text | None = None
    format: CustomFormat | None = Field(None, description="Any text when not given.")


class TextTool(StrictModel):
    """A custom tool, as one entry of `tools`."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.custom.name

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar that the input must match."""
        given = self.custom.format.grammar if self.custom.format is not None else None
        return None if given is None else InputGrammar(given.syntax, given.definition)

    @property
    def is_strict(self) -> bool:
        """A grammar is kept whenever the tool is called."""
        return self.grammar is not None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The schema of a function of one string, which the calls of this tool are to the model."""
        return enforced_schema(self.grammar)

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.custom.model_dump(exclude_none=True, exclude={"format"})
        return {"type": "function", "function": {**function, "parameters": input_schema(self.grammar)}}


class TextToolReference(StrictModel):
    """A custom tool by its name."""

    name: str


class NamedTextTool(StrictModel):
    """{"type": "custom", "custom": {"name": ...}}: call this one."""

    type: Literal["custom"]
    custom: TextToolReference

    @property
    def name(self) -> str:
        """The name of the chosen tool."""
        return self.custom.name


class TextCall(History):
    """Holds an earlier call of a custom tool."""

    name: FunctionName
    input: Text


class TextToolCall(History):
    """A call of a custom tool, as one entry of an assistant message's tool_calls."""

    id: str | None = None
    type: Literal["custom"]
    custom: TextCall

    def for_template(self) -> dict[str, Any]:
        """The entry as chat templates expect it."""
        function = {"name": self.custom.name, "arguments": Arguments({INPUT: self.custom.input})}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if self.id is None else {"id": self.id, **call}
