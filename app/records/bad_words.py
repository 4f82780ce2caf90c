"""Holds the words that an answer must not contain, in the model's tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class BadWords:
    """The params' `bad_words`; each word in every way in which it can be written."""

    token_ids: tuple[tuple[int, ...], ...]
