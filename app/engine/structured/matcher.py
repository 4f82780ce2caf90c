"""Where one request stands in its grammar.

A matcher sees every token of the output on the host, once each, in order. With a thought before the answer it lets
everything pass until the tokens that end the thought have come, and only then starts to match.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from app.engine.structured.vocabulary import num_mask_words


class GrammarFailure(Exception):
    """The request cannot go on under its grammar; the text says why."""


class Matcher:
    """`accept` each token; `fill_mask` for the next one."""

    def __init__(self, grammar: LLMatcher, vocabulary: LLTokenizer, end_of_thought: tuple[int, ...] = ()) -> None:
        self.grammar = grammar  # ours alone
        self.num_words = num_mask_words(vocabulary)
        self._vocabulary = vocabulary
        # In bytes: a model may write the same text in other tokens, the last of which may hold more than the end.
        self._end_of_thought: bytes = vocabulary.decode_bytes(list(end_of_thought))
        self._recent: bytes | None = b"" if end_of_thought else None  # None: the thought is over

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        return self._recent is None

    @property
    def is_complete(self) -> bool:
        """Whether the text is an answer to which nothing can be added."""
        return self._recent is None and bool(self.grammar.is_stopped()) and not self.grammar.is_error()

    def accept(self, token: int) -> None:
        """Take in the output's next token, end tokens included; GrammarFailure when it cannot follow."""
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
        """Text of the thought since its end could have begun; what follows the end begins the answer."""
        _, found, rest = text.partition(self._end_of_thought)
        if not found:
            self._recent = text[-len(self._end_of_thought) :]
            return
        self._recent = None
        rest = rest.lstrip()  # the empty line between thought and answer is no part of either
        if rest and not self.grammar.consume_tokens(self._vocabulary.tokenize_bytes(rest)):
            raise GrammarFailure(f"the structured output does not begin as it should: {self._reason()}")

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, in int32 [num_words].

        When that is too much work, or no token may, the mask is of no use and the next `accept` fails.
        """
        assert self.is_active
        assert mask.flags.c_contiguous
        self.grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def _reason(self) -> str:
        return str(self.grammar.get_error()).partition("\n")[0]
