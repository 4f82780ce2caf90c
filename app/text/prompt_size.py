"""Bounds how much of a text is tokenised: one that cannot fit is refused or cut before it is tokenised whole.

Tokenising a text takes some hundred bytes of memory a character. A text of more characters than a context's tokens can
stand for is refused at once; a long one is tokenised in pieces, no further than to where it surely exceeds its room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.errors import PromptTooLongError
from app.text.tokenizer import Tokenizer

PIECE_CHARS = 1 << 16
COMMON_CHARS_PER_TOKEN = 4  # a text of at most so many characters for each token of its room is tokenised at once
# A piece may have more tokens than its characters have in the whole text, as words are cut at its ends: one in so many.
CUT_TOKENS, CUT_SHARE = 64, 64

Keeps = Literal["all", "first", "last"]


@dataclass(slots=True, frozen=True)
class TextRoom:
    """The tokens that a text may have. One with more of them is refused, or loses its end or its beginning."""

    num_tokens: int
    keeps: Keeps = "all"
    what: str = "the model's context"  # whose room it is, for errors
    field: str = "prompt"  # where the text came from

    def check(self, tokenizer: Tokenizer, num_chars: int) -> None:
        """PromptTooLongError for a text of so many characters that it cannot fit, whatever they are."""
        if self.keeps == "all" and num_chars > self.num_tokens * tokenizer.max_chars_per_token:
            raise self._too_long(num_chars)

    def fit(self, tokenizer: Tokenizer, text: str) -> str:
        """`text`, or the part of it that has all of the tokens to keep, and some. PromptTooLongError as for `check`."""
        self.check(tokenizer, len(text))
        enough = _enough_chars(tokenizer, text, self.num_tokens, self.keeps == "last")
        if enough is None:
            return text
        if self.keeps == "all":
            raise self._too_long(len(text))
        return text[-enough:] if self.keeps == "last" else text[:enough]

    def _too_long(self, num_chars: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"{self.what} holds {self.num_tokens} tokens; a text of {num_chars} characters has more", param=self.field
        )


def _enough_chars(tokenizer: Tokenizer, text: str, num_tokens: int, from_end: bool) -> int | None:
    """Characters at one end of `text` that surely have more than `num_tokens` tokens; None when it may not have them.

    Texts of common length count as such that may not.
    """
    if len(text) <= max(PIECE_CHARS, COMMON_CHARS_PER_TOKEN * num_tokens):
        return None
    found = 0
    for start in range(0, len(text), PIECE_CHARS):
        end = min(len(text), start + PIECE_CHARS)
        piece = text[len(text) - end : len(text) - start] if from_end else text[start:end]
        count = len(tokenizer.encode(piece, add_special_tokens=False))
        found += max(0, count - CUT_TOKENS - count // CUT_SHARE)
        if found > num_tokens:
            return end
    return None
