"""Documents in a message of Anthropic's dialect: those of text are shown to the model as text."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.api.http.strict_models import History
from app.bounds import Items, Text


class TextBlock(History):
    """Text."""

    type: Literal["text"]
    text: Text


class TextSource(History):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text

    def text(self) -> str:
        """The document's text."""
        return self.data


class Base64Source(History):
    """A document's text in base64."""

    type: Literal["base64"]
    media_type: Literal["text/plain"]
    data: Text

    @model_validator(mode="after")
    def _check(self) -> Base64Source:
        try:
            self.text()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ValueError(f"data is no UTF-8 text in base64: {error}") from None
        return self

    def text(self) -> str:
        """The document's text."""
        return base64.b64decode(self.data, validate=True).decode()


class ContentSource(History):
    """A document in parts."""

    type: Literal["content"]
    content: Text | Items[Annotated[TextBlock, Field(discriminator=None)]]

    def text(self) -> str:
        """The document's text."""
        return self.content if isinstance(self.content, str) else "\n".join(block.text for block in self.content)


class DocumentBlock(History):
    """A document of text, with its title."""

    type: Literal["document"]
    source: Annotated[TextSource | Base64Source | ContentSource, Field(discriminator="type")]
    title: Text | None = None
    context: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        """Refuse by name what no text model can read, and citations, which it cannot be made to give."""
        given = data if isinstance(data, dict) else {}
        citations, source = given.get("citations"), given.get("source")
        if isinstance(citations, dict) and citations.get("enabled"):
            raise PydanticCustomError("unsupported", "citations are not supported", {"field": "citations"})
        source = source if isinstance(source, dict) else {}
        kind, media_type = source.get("type"), source.get("media_type")
        if kind in ("url", "file"):
            words = {"field": "source.type", "kind": kind}
            raise PydanticCustomError("unsupported", "documents of source {kind} are not read; send their text", words)
        if kind == "base64" and media_type != "text/plain":
            words = {"field": "source.media_type", "media": str(media_type)[:64]}
            raise PydanticCustomError("unsupported", "documents of {media} are not read; send their text", words)
        return data

    @property
    def text(self) -> str:
        """The document as the model sees it."""
        about = [f"{name}: {value}" for name, value in (("Title", self.title), ("Context", self.context)) if value]
        return "\n".join(["<document>", *about, self.source.text(), "</document>"])
