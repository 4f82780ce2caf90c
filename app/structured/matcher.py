"""Tracks where one request stands in its grammar.

A matcher sees every token of the output on the host, once each, in order. With reasoning before the answer it lets
everything pass until the tokens that end the reasoning have come, and only then starts to match. Where the model opens
the reasoning itself, the token that does so is allowed beside what the grammar allows first.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from app.structured.reasoning import ReasoningSpan
from app.structured.vocabulary import num_mask_words


class GrammarFailure(Exception):
    """The request cannot go on under its grammar; the text says why."""


class Matcher:
    """`accept` each token; `fill_mask` for the next one."""

    def __init__(self, grammar: LLMatcher, vocabulary: LLTokenizer, reasoning: ReasoningSpan | None = None) -> None:
        self.grammar = grammar  # ours alone
        self.num_words = num_mask_words(vocabulary)
        self._vocabulary = vocabulary
        # The end in bytes: a model may write the same text in other tokens, the last of which may hold more than it.
        self._end: bytes = vocabulary.decode_bytes(list(reasoning.end_token_ids if reasoning is not None else ()))
        self._opening = reasoning.start_token_id if reasoning is not None else None  # None: not, or no more, possible
        is_open = reasoning is not None and self._opening is None
        self._recent: bytes | None = b"" if is_open else None  # None: not in the reasoning

    @property
    def is_active(self) -> bool:
        """True if the next token is constrained."""
        return self._recent is None

    @property
    def is_complete(self) -> bool:
        """True if the text is an answer to which nothing can be added."""
        return self._recent is None and bool(self.grammar.is_stopped()) and not self.grammar.is_error()

    def accept(self, token: int) -> None:
        """Take in the output's next token, end tokens included; GrammarFailure when it cannot follow."""
        opening, self._opening = self._opening, None
        if opening is not None and token == opening:
            self._recent = b""
            return
        if self._recent is not None:
            self._think(self._recent + self._vocabulary.decode_bytes([token]))
            return
        if self.grammar.is_error():  # since its last mask
            raise GrammarFailure(f"the structured output cannot be continued: {self._reason()}")
        if not self.grammar.consume_token(token):
            raise GrammarFailure(
                "the structured output cannot be continued: its grammar allows nothing that bad_words, min_tokens and "
                "the request's other limits leave"
            )

    def _think(self, text: bytes) -> None:
        """Text of the reasoning since its end could have begun; what follows the end begins the answer."""
        _, found, rest = text.partition(self._end)
        if not found:
            self._recent = text[-len(self._end) :]
            return
        self._recent = None
        rest = rest.lstrip()  # the empty line between reasoning and answer is no part of either
        if rest and not self.grammar.consume_tokens(self._vocabulary.tokenize_bytes(rest)):
            raise GrammarFailure(f"the structured output does not begin as it should: {self._reason()}")

    def num_possible(self, drafts: list[int]) -> int:
        """Counts the tokens that the grammar lets follow one another, from the first on. They end before one that
        opens or closes the reasoning, after which other rules hold."""
        if self._recent is None:
            return 0 if drafts[:1] == [self._opening] else self.grammar.deep_copy().validate_tokens(drafts)
        text = self._recent
        for count, token in enumerate(drafts):
            text += self._vocabulary.decode_bytes([token])
            if self._end in text:
                return count
        return len(drafts)

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, in int32 [num_words].

        When that is too much work, or no token may, the mask is of no use and the next `accept` fails.
        """
        assert self.is_active
        assert mask.flags.c_contiguous
        self.grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def allow_reasoning(self, mask: NDArray[np.int32]) -> None:
        """Set the bit of the token with which the model may still open its reasoning, if there is one."""
        if self._opening is not None:
            mask.view(np.uint32)[self._opening // 32] |= np.uint32(1 << self._opening % 32)

    def _reason(self) -> str:
        return str(self.grammar.get_error()).partition("\n")[0]
