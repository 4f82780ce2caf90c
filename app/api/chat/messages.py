"""Conversations in the OpenAI dialect: messages, and how they become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.media_parts import AudioPart, ImagePart, MediaPart, VideoPart
from app.api.chat.tools import AnyTool, AnyToolCall
from app.api.http.strict_models import History, StrictModel
from app.bounds import Items, JsonObject, Text

__all__ = ["THINKING_NAMES", "ChatMessage", "ChatOptions", "StrictModel", "ReasoningEffort", "TextPart", "Verbosity"]

THINKING_NAMES = ("enable_thinking", "thinking")  # by which templates are told whether to think
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class TextPart(History):
    """One part of a message's content."""

    type: str
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise PydanticCustomError("unsupported", "content of type {kind} is not supported", {"kind": kind})
        if kind == "refusal":
            return {"type": "text", "text": data.get("refusal", "")}
        return data

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it."""
        return {"type": self.type, "text": self.text}


def _kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in ("image_url", "input_image", "file"):
        return "image"
    if kind == "video_url":
        return "video"
    return "audio" if kind in ("input_audio", "audio_url") else "text"


Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[ImagePart, Tag("image")]
    | Annotated[VideoPart, Tag("video")]
    | Annotated[AudioPart, Tag("audio")],
    Discriminator(_kind_of_part),
]


_LOST = {"function_call": "deprecated by OpenAI; use tool_calls", "audio": "audio is not supported"}


class ChatMessage(History):
    """One turn of the conversation."""

    role: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="system, developer, user, assistant, tool, or one of its own that the chat template shows.",
    )
    content: Text | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[AnyToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_lost(cls, data: Any) -> Any:
        """Refuse what is part of the conversation and cannot be shown to the model."""
        for name, why in _LOST.items() if isinstance(data, dict) else ():
            if data.get(name) is not None:
                raise PydanticCustomError("unsupported", "{name}: {why}", {"name": name, "why": why})
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_content", "content is required for role {role}", {"role": self.role})
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: call arguments as objects, reasoning under all their names, content.

        gpt-oss's template reads `thinking`, and refuses it beside both text and calls.
        """
        message = self.model_dump(exclude_none=True, exclude={"refusal", "tool_calls", "content"})
        if self.content is not None:
            parts = self.content if isinstance(self.content, list) else None
            message["content"] = self.content if parts is None else [part.for_template() for part in parts]
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if reasoning := self.reasoning or self.reasoning_content:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
            if not (self.tool_calls and self.content):
                message["thinking"] = reasoning
        return {**message, "content": message.get("content", self.refusal or "")}

    def media(self, place: str) -> list[tuple[str, MediaPart]]:
        """The pictures, videos and sounds of the content, each with its field; `place`: of the message in the body."""
        parts = enumerate(self.content if isinstance(self.content, list) else ())
        return [(part.field(f"{place}.content.{i}"), part) for i, part in parts if isinstance(part, MediaPart)]

    @property
    def has_own_role(self) -> bool:
        """True if the role is one that not every chat template knows."""
        return self.role not in ROLES

    @property
    def num_chars(self) -> int:
        """Characters of the content."""
        if isinstance(self.content, list):
            return sum(len(part.text) for part in self.content)
        return len(self.content or "")

    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatOptions(StrictModel):
    """Says how a conversation becomes a prompt; shared by chat and /tokenize."""

    messages: Items[ChatMessage] = Field(min_length=1, description="The conversation so far.")
    tools: Items[AnyTool] | None = Field(None, description="Tools the model may call.")
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open and continue it.")
    add_special_tokens: bool = Field(False, description="Add the tokenizer's special tokens besides the template's.")
    documents: Items[JsonObject] | None = Field(None, description="Documents for the template.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")
    chat_template: Text | None = Field(None, description="Jinja source to use instead of the model's template.")
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None

    def template_names(self) -> dict[str, Any]:
        """Returns what the template may read besides the conversation; the client's own chat_template_kwargs win.

        Where a template can be told whether to think (under either name in use), any effort but "none" says yes. A
        template that reads none of these names is as it was: effort and verbosity are hints, as at vLLM.
        """
        names: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            names = {"reasoning_effort": self.reasoning_effort, **dict.fromkeys(THINKING_NAMES, thinks)}
        if self.verbosity is not None:
            names["verbosity"] = self.verbosity
        return names | (self.chat_template_kwargs or {})
