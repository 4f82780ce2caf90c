"""The forms of transcriptions and translations: their fields beside the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.api.generation.placement import PlacementFields
from app.api.http.strict_models import StrictModel
from app.bounds import Int64, Items
from app.errors import InvalidRequestError, UnsupportedError

FILE = "file"
MAX_PROMPT_CHARS = 1 << 14
MAX_FIELDS = 64  # of a form, items of lists among them
TIMED = ("verbose_json", "srt", "vtt")  # formats that say when something was said
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_ONE_SPEAKER = "who speaks is not told apart"


class SoundForm(PlacementFields, StrictModel):
    """Fields that both routes have."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("known_speaker_names", "known_speaker_references"), _ONE_SPEAKER),
        "keywords": "not supported; see prompt",
        "languages": "not supported: one language, or none",
        **dict.fromkeys(("top_p", "top_k", "min_p"), "tokens are drawn by temperature alone"),
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), "not supported"),
        "vllm_xargs": "plugins take nothing from requests",
    }
    ignored: ClassVar[Mapping[str, str]] = {"user": "it names a user at OpenAI"}

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    prompt: str | None = Field(
        None, max_length=MAX_PROMPT_CHARS, description="A text that goes before: names and words as they are spelt."
    )
    response_format: Format = Field("json", description="The form of the answer.")
    temperature: float = Field(
        0.0,
        ge=0,
        le=1,
        description="0 takes the most likely tokens, and tries higher ones where what comes is too unlikely or goes in "
        "circles.",
    )
    seed: Int64 | None = Field(None, ge=0, description="Makes what is drawn at a temperature repeatable.")

    @field_validator("response_format", mode="before")
    @classmethod
    def _one_speaker(cls, value: Any) -> Any:
        if value == "diarized_json":
            raise PydanticCustomError("unsupported", "diarized_json is not supported: {why}", {"why": _ONE_SPEAKER})
        return value

    @property
    def is_timed(self) -> bool:
        """True if the answer says when something was said."""
        return self.response_format in TIMED


class TranscriptionForm(SoundForm):
    """Fields of POST /v1/audio/transcriptions beside `file`."""

    language: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="The language that is spoken, by its code or its name; found out when not given."
    )
    timestamp_granularities: Items[Literal["segment", "word"]] = Field(
        [], description="What verbose_json gives times of; segments when not given."
    )
    include: Items[Literal["logprobs"]] = Field([], description="`logprobs`: those of the tokens, in json.")
    stream: bool = Field(False, description="Answer as server-sent events while tokens come: json and text only.")
    chunking_strategy: Literal["auto"] | None = Field(
        None, description="Long files are always cut at quiet points: `auto`."
    )

    @field_validator("chunking_strategy", mode="before")
    @classmethod
    def _cut_by_us(cls, value: Any) -> Any:
        if isinstance(value, dict) or value == "server_vad":
            raise PydanticCustomError("unsupported", "server_vad is not supported: files are cut at quiet points", {})
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequestError("needs response_format=verbose_json", param="timestamp_granularities")
        if self.include and self.response_format != "json":
            raise InvalidRequestError("logprobs are only given with response_format=json", param="include")
        if self.stream and self.is_timed:
            raise UnsupportedError(f"only json and text stream, not {self.response_format}", param="response_format")
        return self

    @property
    def has_words(self) -> bool:
        """True if words come with their times."""
        return "word" in self.timestamp_granularities

    @property
    def has_segments(self) -> bool:
        """True if segments do."""
        return not self.timestamp_granularities or "segment" in self.timestamp_granularities


class TranslationForm(SoundForm):
    """Fields of POST /v1/audio/translations beside `file`: what is said, in English."""
