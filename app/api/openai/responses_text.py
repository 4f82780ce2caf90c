"""The pieces that items of /v1/responses consist of: parts of text, and how far an item has come."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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


Part = Annotated[ItemText | ItemRefusal, Field(discriminator="type")]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
