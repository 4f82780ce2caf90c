"""Where one request stands in its grammar.

A matcher sees every token of the output on the host, once each, in order. With a thought before the answer it lets
everything pass until the tokens that end the thought have come, and only then starts to match.
"""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarFailure(Exception):
    """The request cannot go on under its grammar; the text says why."""


class Matcher:
    """`accept` each token; `fill_mask` for the next one."""

    def __init__(self, grammar: LLMatcher, num_words: int, end_of_thought: tuple[int, ...] = ()) -> None:
        self.grammar = grammar  # ours alone
        self.num_words = num_words  # of 32 bits, in a mask
        self._end_of_thought = end_of_thought
        self._recent: list[int] | None = [] if end_of_thought else None  # None: the thought is over

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        return self._recent is None

    @property
    def is_complete(self) -> bool:
        """Whether the text is an answer to which nothing can be added."""
        return self._recent is None and bool(self.grammar.is_stopped()) and not self.grammar.is_error()

    def accept(self, token: int) -> None:
        """Take in the output's next token, which is not one that ends it; GrammarFailure when it cannot follow."""
        if self._recent is not None:
            self._recent = [*self._recent, token][-len(self._end_of_thought) :]
            if tuple(self._recent) == self._end_of_thought:
                self._recent = None
            return
        if not self.grammar.consume_token(token):
            raise GrammarFailure(f"the structured output cannot be continued: {self._reason()}")

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next, in int32 [num_words].

        When that is too much work, or no token may, the mask is of no use and the next `accept` fails.
        """
        assert self.is_active
        assert mask.flags.c_contiguous
        self.grammar.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def _reason(self) -> str:
        return str(self.grammar.get_error()).partition("\n")[0]
