"""Says what grammars ask of a vocabulary; who knows the tokenizer makes it."""

from __future__ import annotations

from typing import Protocol

from llguidance import LLTokenizer


class VocabularySource(Protocol):
    """Says where a vocabulary comes from."""

    def load(self) -> LLTokenizer:
        """The tokens as the grammar library wants them. CheckpointError when there is no tokenizer."""

    def recipe(self) -> list[str]:
        """`module:function` and its arguments, with which another process makes the same source."""


def num_mask_words(vocabulary: LLTokenizer) -> int:
    """32-bit words in a mask over the vocabulary."""
    return (int(vocabulary.vocab_size) + 31) // 32
