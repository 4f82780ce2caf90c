"""Words of tokens, judged by transformers' way to join them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from app.api.openai.audio.words import Word, words_of

TIME, END = 1000, 999
TEXTS = {
    "plain": [" The", " quick", " br", "own", " fox"],
    "no space first": ["The", " quick"],
    "marks": [" He", " said", ",", " \"", "Hi", "!\"", " (", "no", ")", " -", "x", " 'tis", " '", "s"],
    "a space alone": [" a", " ", " ", "b", " . "],
    "bytes": [" na", b"\xc3", b"\xaf", "ve", b" \xe2\x82", b"\xac", "5"],
    "half a character": [" a", b"\xe2\x82"],
    "japanese": ["今", b"\xe6\x97", b"\xa5", "は", "。", "「", "い", "い", "」", "、"],
}  # fmt: skip


class Spelt:
    """A tokenizer whose token n is the n-th text."""

    eos_token_id = END

    def __init__(self, texts: Sequence[str | bytes]) -> None:
        self.texts = [text.encode() if isinstance(text, str) else text for text in texts]

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        return b"".join(self.texts[token] for token in token_ids).decode(errors="replace")


def found(spelt: Spelt, token_ids: list[int], ends: list[float], *, has_spaces: bool = True) -> list[Word]:
    return words_of(
        token_ids, ends, lambda token: token < END, lambda token: token >= TIME, spelt.decode, (10.0, 11.0),
        has_spaces=has_spaces,
    )  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_words_are_those_of_transformers(name: str) -> None:
    spelt, ids = Spelt(TEXTS[name]), list(range(len(TEXTS[name])))
    words, _, places = _combine_tokens_into_words(spelt, ids, language="japanese" if name == "japanese" else "english")
    ends = [(i + 1) / 50 for i in ids]
    expected = [
        Word(word.strip(), round(10 + (ends[own[0] - 1] if own[0] else 0.0), 2), round(10 + ends[own[-1]], 2))
        for word, own in zip(words, places, strict=True)
        if word.strip()
    ]
    assert found(spelt, ids, ends, has_spaces=name != "japanese") == expected


def test_times_part_words_and_count_as_tokens() -> None:
    spelt = Spelt([" a", "b", "c"])
    ends = [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]
    assert found(spelt, [TIME, 0, 1, TIME + 5, 2, END], ends) == [Word("ab", 10.1, 10.3), Word("c", 10.4, 10.5)]


def test_words_end_with_their_piece() -> None:
    spelt = Spelt([" a", " b"])
    assert found(spelt, [0, 1], [0.9, 1.2]) == [Word("a", 10.0, 10.9), Word("b", 10.9, 11.0)]
    assert found(spelt, [0], [0.0]) == [Word("a", 10.0, 10.0)]
    assert found(spelt, [], []) == []
