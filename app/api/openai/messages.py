"""Conversations in the OpenAI dialect: messages, tools, and how they become a prompt."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError


class Closed(BaseModel):
    """Immutable, closed to unknown fields; null means not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(Closed):
    """One part of a message's content."""

    type: str
    text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise PydanticCustomError("unsupported", "content of type {kind} is not supported", {"kind": kind})
        if kind == "refusal":
            return {"type": "text", "text": data.get("refusal", "")}
        return data


class FunctionCall(Closed):
    """A call that the assistant made earlier."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict, description="An object, as JSON text or as it is.")

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON: {error}") from error


class ToolCall(Closed):
    """One entry of an assistant message's tool_calls."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Closed):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_content", "content is required for role {role}", {"role": self.role})
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: call arguments as objects, content never null."""
        message = self.model_dump(exclude_none=True, exclude={"refusal", "annotations"})
        return {**message, "content": message.get("content", self.refusal or "")}


class FunctionDefinition(Closed):
    """What a tool does and takes."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("strict")
    @classmethod
    def _not_strict(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unsupported", "strict tools need structured outputs, not supported yet")
        return value


class Tool(Closed):
    """One entry of `tools`."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class ChatOptions(Closed):
    """How a conversation becomes a prompt; shared by chat and /tokenize."""

    messages: list[ChatMessage] = Field(min_length=1, description="The conversation so far.")
    tools: list[Tool] | None = Field(None, description="Functions the model may call.")
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open and continue it.")
    add_special_tokens: bool = Field(False, description="Add the tokenizer's special tokens besides the template's.")
    documents: list[dict[str, Any]] | None = Field(None, description="Documents for the template.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further names for the template.")
