"""Bad words as token ids (invariant I4): the engine forbids token sequences, the client names words."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import InvalidRequestError
from app.text.tokenizer import Tokenizer


def bad_words_token_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences to forbid: each word as it stands, and as it stands behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tuple(tokenizer.encode(word.strip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.strip(), add_special_tokens=False))
        if not plain:
            raise InvalidRequestError(f"{word!r} is not a word", param="bad_words")
        found[plain] = None
        if spaced[-len(plain) :] != plain:  # else forbidding the plain form covers it
            found[spaced] = None
    return tuple(found)
