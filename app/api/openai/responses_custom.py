"""Custom tools in the words of /v1/responses: definitions, calls and what the calls gave."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from app.api.chat.call_arguments import FunctionName
from app.api.openai.responses_text import ItemStatus, Part
from app.api.strict_models import History, StrictModel
from app.bounds import Items, Text


class ResponsesTextFormat(StrictModel):
    """What the input of a custom tool looks like; a grammar's fields stand beside `type`."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="With type grammar.")
    definition: Text | None = Field(
        None, min_length=1, description="Lark, or a regular expression that the whole text matches."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {self.syntax is not None, self.definition is not None} != {self.type == "grammar"}:
            raise ValueError("syntax and definition belong to type 'grammar', and only to it")
        return self


class ResponsesTextTool(StrictModel):
    """A custom tool: it takes a text instead of JSON arguments."""

    type: Literal["custom"]
    name: FunctionName
    description: Text | None = None
    format: ResponsesTextFormat | None = Field(None, description="Any text when not given.")

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat has it."""
        custom = self.model_dump(exclude_none=True, exclude={"type", "format"})
        if self.format is not None:
            grammar = self.format.model_dump(exclude_none=True, exclude={"type"})
            custom["format"] = {"type": self.format.type} | ({"grammar": grammar} if grammar else {})
        return {"type": "custom", "custom": custom}


class CustomToolCallItem(History):
    """A call of a custom tool that an earlier answer made."""

    type: Literal["custom_tool_call"]
    call_id: str = Field(min_length=1)
    name: FunctionName
    input: Text
    id: str | None = None
    status: ItemStatus | None = None

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended inside the call."""
        return self.status == "incomplete"

    def for_chat(self) -> dict[str, Any]:
        """The call as a chat has it."""
        return {"id": self.call_id, "type": "custom", "custom": {"name": self.name, "input": self.input}}


class CustomToolCallOutputItem(History):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    call_id: str = Field(min_length=1)
    output: Text | Items[Part]
    id: str | None = None
    status: ItemStatus | None = None
