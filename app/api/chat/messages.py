"""Conversations in the OpenAI dialect: messages, and how they become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, ModelWrapValidatorHandler, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.tools import AnyTool, AnyToolCall
from app.api.http.strict_models import History, StrictModel
from app.bounds import Items, JsonObject, Text
from app.media.processors.base import Detail
from app.records.media import MediaKind

__all__ = ["THINKING_NAMES", "ChatMessage", "ChatOptions", "StrictModel", "ReasoningEffort", "TextPart", "Verbosity"]

THINKING_NAMES = ("enable_thinking", "thinking")  # by which templates are told whether to think
SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "mp4", "mpeg", "mpga", "webm")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class ImageUrl(History):
    """A picture's address: a data URL, or one that the server may fetch."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(History):
    """A picture in a message's content: `image_url`, or a `file` that is one."""

    type: Literal["image_url"]
    image_url: ImageUrl
    text: ClassVar[str] = ""
    kind: ClassVar[MediaKind] = "image"
    _field: str | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("type") == "file":
            return {"type": "image_url", "image_url": _url_of_file(data.get("file"))}
        url = data.get("image_url")
        if data.get("file_id"):
            raise PydanticCustomError("unsupported", "file_id: pictures are not read from files", {})
        if isinstance(url, str):
            url = {"url": url, "detail": data.get("detail")}
        return {"type": "image_url", "image_url": url}

    @classmethod
    def of(cls, url: str, detail: str | None, field: str) -> Self:
        """A picture that a dialect calls otherwise; `field` is its place in the body that was sent."""
        part = cls.model_validate({"type": "image_url", "image_url": {"url": url, "detail": detail}})
        part._field = field
        return part

    def field(self, place: str) -> str:
        """The field of the body that it came in; `place`: of the message's part."""
        return self._field or f"{place}.image_url"

    @property
    def url(self) -> str:
        """Its address."""
        return self.image_url.url

    @property
    def detail(self) -> Detail:
        """Says how much of it is wanted."""
        return self.image_url.detail or "auto"

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it, which write where it goes."""
        return {"type": "image"}


class AudioUrl(History):
    """A sound's address: a data URL, or one that the server may fetch."""

    url: Text


class AudioPart(History):
    """A sound in a message's content: OpenAI's `input_audio`, or `audio_url` as for pictures."""

    type: Literal["audio_url"]
    audio_url: AudioUrl
    text: ClassVar[str] = ""
    kind: ClassVar[MediaKind] = "audio"
    detail: ClassVar[Detail] = "auto"
    _field: str | None = PrivateAttr(None)
    _sent: str = PrivateAttr("audio_url")

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_form(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        is_bytes = data.get("type") == "input_audio"
        url = _url_of_sound(data.get("input_audio")) if is_bytes else data.get("audio_url")
        part = handler({"type": "audio_url", "audio_url": {"url": url} if isinstance(url, str) else url})
        part._sent = "input_audio" if is_bytes else "audio_url"
        return part

    @classmethod
    def of(cls, sound: dict[str, Any], field: str) -> Self:
        """A sound of another dialect, {data, format}; `field` is its place in the body that was sent."""
        part = cls.model_validate({"type": "input_audio", "input_audio": sound})
        part._field = field
        return part

    def field(self, place: str) -> str:
        """The field of the body that it came in; `place`: of the message's part."""
        return self._field or f"{place}.{self._sent}"

    @property
    def url(self) -> str:
        """Its address."""
        return self.audio_url.url

    def for_template(self) -> dict[str, Any]:
        """The part as chat templates expect it, which write where it goes."""
        return {"type": "audio"}


MediaPart = ImagePart | AudioPart


def _url_of_sound(sound: Any) -> str:
    """Makes a data URL of what `input_audio` holds. It refuses a format that is none."""
    given = sound if isinstance(sound, dict) else {}
    data, kind = given.get("data"), given.get("format", SOUND_FORMATS[0])
    if not isinstance(data, str):
        raise PydanticCustomError("unsupported", "input_audio: data is required, a sound in base64", {})
    if kind not in SOUND_FORMATS:
        words = {"known": ", ".join(SOUND_FORMATS)}
        raise PydanticCustomError("unsupported", "input_audio: format is one of {known}", words)
    return data if data[:5].lower() == "data:" else f"data:audio/{kind};base64,{data}"


def _url_of_file(file: Any) -> dict[str, Any]:
    given = file if isinstance(file, dict) else {}
    data = given.get("file_data")
    if not isinstance(data, str):
        raise PydanticCustomError("unsupported", "file: only file_data is read, a picture in base64", {})
    return {"url": data if data[:5].lower() == "data:" else f"data:;base64,{data}"}


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
    return "audio" if kind in ("input_audio", "audio_url") else "text"


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image")] | Annotated[AudioPart, Tag("audio")],
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
        """The pictures and sounds of the content, each with its field; `place`: of the message in the body."""
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
