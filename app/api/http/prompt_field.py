"""The field of a body that holds prompts in any of four forms: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from app.bounds import Items, Text, TokenIds


def _prompt_kind(value: Any) -> str:
    """Tells which of the four forms a prompt has, by its first element."""
    if not isinstance(value, list) or not value:
        return "text"
    first = value[0]
    if isinstance(first, str):
        return "texts"
    return "batches" if isinstance(first, list) else "ids"


PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Items[Text], Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[Items[TokenIds], Tag("batches")],
    Discriminator(_prompt_kind),
]
