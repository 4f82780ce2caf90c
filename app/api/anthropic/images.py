"""Pictures in a message of Anthropic's dialect, as base64 or by their address."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.chat.media_parts import ImagePart
from app.api.http.strict_models import History
from app.bounds import Text


class Base64Image(History):
    """A picture's file. What it is its first bytes say, not the type that stands here."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: Text

    def url(self) -> str:
        """The picture as a data URL."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlImage(History):
    """A picture on another server."""

    type: Literal["url"]
    address: Text = Field(alias="url")

    def url(self) -> str:
        """The picture's address."""
        return self.address


class ImageBlock(History):
    """A picture."""

    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage, Field(discriminator="type")]
    text: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _no_file(cls, data: Any) -> Any:
        source = data.get("source") if isinstance(data, dict) else None
        if isinstance(source, dict) and source.get("type") == "file":
            words = {"field": "source.type"}
            raise PydanticCustomError("unsupported", "pictures are not read from files; send them as base64", words)
        return data

    def for_chat(self, place: str) -> ImagePart:
        """The same as a part of a chat's message; `place`: of the block in the body."""
        return ImagePart.of(self.source.url(), None, f"{place}.source")
