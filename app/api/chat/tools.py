"""Tools in the OpenAI dialect: their definitions, the choice among them, and calls made earlier."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from app.api.chat.call_arguments import Arguments, FunctionName, form_of
from app.api.chat.custom_tools import NamedTextTool, TextTool, TextToolCall
from app.api.http.strict_models import History, StrictModel
from app.bounds import Items, JsonObject, Text
from app.parsers.answer import schema_of
from app.parsers.custom_input import InputGrammar


class FunctionCall(History):
    """A call that the assistant made earlier."""

    name: FunctionName
    arguments: JsonObject | Text = Field("{}", description="An object, as JSON text or as it is.")

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: dict[str, Any] | str) -> dict[str, Any] | str:
        _object(value)
        return value

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        text = self.arguments.strip() if isinstance(self.arguments, str) else None
        return {"name": self.name, "arguments": Arguments(_object(self.arguments), text or None)}


def _object(value: dict[str, Any] | str) -> dict[str, Any]:
    """Arguments as an object; ValueError when they are none. Empty text is an empty object."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value.strip() or "{}")
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError("must be a JSON object")
    return parsed


class ToolCall(History):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """The entry as chat templates expect it."""
        call: dict[str, Any] = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id, **call}


class FunctionDefinition(StrictModel):
    """Says what a tool does and takes."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="True: arguments follow the schema, enforced by grammar.")


class Tool(StrictModel):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    @property
    def name(self) -> str:
        """The tool's name."""
        return self.function.name

    @property
    def grammar(self) -> InputGrammar | None:
        """None: only custom tools have an input grammar."""
        return None

    @property
    def is_strict(self) -> bool:
        """True if arguments follow the schema whenever the tool is called."""
        return bool(self.function.strict)

    @property
    def schema_of_arguments(self) -> Mapping[str, Any]:
        """The schema of a call's arguments."""
        return schema_of(self.function.parameters)

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class FunctionReference(StrictModel):
    """A tool by its name."""

    name: str


class NamedTool(StrictModel):
    """{"type": "function", "function": {"name": ...}}: call this one."""

    type: Literal["function"]
    function: FunctionReference

    @property
    def name(self) -> str:
        """The name of the chosen tool."""
        return self.function.name


AnyTool = Annotated[Annotated[Tool, Tag("json")] | Annotated[TextTool, Tag("text")], Discriminator(form_of)]
AnyToolCall = Annotated[Annotated[ToolCall, Tag("json")] | Annotated[TextToolCall, Tag("text")], Discriminator(form_of)]
AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("json")] | Annotated[NamedTextTool, Tag("text")], Discriminator(form_of)
]


class AllowedToolList(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[AnyNamedTool] = Field(min_length=1)


class AllowedTools(StrictModel):
    """{"type": "allowed_tools", ...}: only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


def _kind(value: Any) -> str | None:
    if isinstance(value, AllowedTools) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
        return "allowed"
    if isinstance(value, dict | NamedTool | NamedTextTool):
        return "text" if form_of(value) == "text" else "named"
    return "word" if value in ("none", "auto", "required") else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[NamedTextTool, Tag("text")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(
        _kind,
        custom_error_type="tool_choice",
        custom_error_message="must be none, auto, required, or an object that names a tool",
    ),
]
