"""The tokens of a model, as the grammar library wants them.

The library can read a tokenizer.json by itself, but then takes every added token for a special one; such as
`<tool_call>`, which many models have as a token and write as text. So it gets our table of bytes instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from llguidance import LLTokenizer

from app.text.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class TokenizerVocabulary:
    """The vocabulary of a model directory. `vocab_size` is the model's: its ids past the tokenizer's are never
    allowed."""

    directory: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def recipe(self) -> list[str]:
        """See VocabularySource."""
        numbers = (self.vocab_size, *self.eos_token_ids)
        return ["app.text.grammar_vocabulary:from_recipe", str(self.directory), *map(str, numbers)]

    def load(self) -> LLTokenizer:
        """Takes milliseconds for the built-in model and a second for 128,000 tokens.

        CheckpointError when there is no tokenizer.
        """
        tokenizer = Tokenizer.from_directory(self.directory)
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = list(dict.fromkeys((*self.eos_token_ids, *own)))
        size = max(self.vocab_size, len(tokenizer.byte_table))
        return LLTokenizer(_Words(tokenizer, ends[0] if ends else None), n_vocab=size, eos_token=ends or None)  # type: ignore[arg-type]


def from_recipe(directory: str, vocab_size: str, *eos_token_ids: str) -> TokenizerVocabulary:
    """The source whose `recipe` these were."""
    return TokenizerVocabulary(Path(directory), int(vocab_size), tuple(map(int, eos_token_ids)))


class _Words:
    """The interface that the library asks of a tokenizer: the bytes of each token, and the tokens of a text.

    With the latter it keeps a model to its own way of writing where the grammar leaves no choice of text. The text of
    a special token is written in plain ones: it is text, and special tokens are none.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = tokenizer.byte_table
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        self._backend.encode_special_tokens = True
        special = tokenizer.special_token_ids
        self._ids = {token: index for index, token in enumerate(self.tokens) if token and index not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens whose bytes are exactly the text's."""
        data = text.encode() if isinstance(text, str) else bytes(text)
        try:
            ids: list[int] = self._backend.encode(data.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return self._greedy(data)
        # A tokenizer that normalises, or begins every text with a space, does not give the text back.
        return ids if b"".join(self.tokens[index] for index in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Greedy longest match; bytes without a token end the list."""
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids
