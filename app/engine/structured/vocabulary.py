"""The tokens of a model, as the grammar library wants them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer

from app.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class VocabularySource:
    """Where a vocabulary comes from. `vocab_size` is the model's: its ids past the tokenizer's are never allowed."""

    directory: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """Takes milliseconds for the built-in model and half a second for 128,000 tokens.

        CheckpointError when there is no tokenizer.
        """
        tokenizer = Tokenizer.from_directory(self.directory)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = list(dict.fromkeys((*self.eos_token_ids, *own)))
        size = max(self.vocab_size, tokenizer.vocab_size)
        return LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=ends or None)


def num_mask_words(vocabulary: LLTokenizer) -> int:
    """32-bit words in a mask over the vocabulary."""
    return (int(vocabulary.vocab_size) + 31) // 32
