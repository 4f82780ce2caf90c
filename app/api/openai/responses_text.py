"""The pieces that items of /v1/responses consist of: parts of text, pictures, sounds, and how far an item has come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.media_parts import AudioPart, ImagePart
from app.api.http.strict_models import History
from app.bounds import Text


class ItemText(History):
    """Text in a message."""

    type: Literal["input_text", "output_text"]
    text: Text


class ItemRefusal(History):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The refusal as text."""
        return self.refusal


class ItemImage(History):
    """A picture in a message, or in the result of a call."""

    type: Literal["input_image"]
    image_url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None
    text: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("file_id"):
            words = {"field": "file_id"}
            raise PydanticCustomError("unsupported", "pictures are not read from files; send an image_url", words)
        return data

    def for_chat(self, place: str) -> ImagePart:
        """The same as a part of a chat's message; `place`: of the part in the body, or of all it brings."""
        return ImagePart.of(self.image_url, self.detail, f"{place}.image_url" if "." in place else place)


class InputAudio(History):
    """A sound in base64."""

    data: Text
    format: str | None = Field(None, max_length=32)


class ItemAudio(History):
    """A sound in a message."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    text: ClassVar[str] = ""

    def for_chat(self, place: str) -> AudioPart:
        """The same as a part of a chat's message; `place`: of the part in the body, or of all it brings."""
        given = self.input_audio.model_dump(exclude_none=True)
        return AudioPart.of(given, f"{place}.input_audio" if "." in place else place)


ItemMedia = ItemImage | ItemAudio
Part = Annotated[ItemText | ItemImage | ItemAudio | ItemRefusal, Field(discriminator="type")]
Content = str | Sequence[ItemText | ItemImage | ItemAudio | ItemRefusal]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
