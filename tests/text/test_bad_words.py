"""Bad words as token ids."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import InvalidRequestError
from app.text.bad_words import bad_words_token_ids
from app.text.tokenizer import Tokenizer


def test_a_word_is_forbidden_with_and_without_its_space(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer.from_directory(directories["byte_level"])
    found = bad_words_token_ids([" fox ", "Köln"], tokenizer)
    assert {tokenizer.decode(ids) for ids in found} == {"fox", " fox", "Köln", " Köln"}
    assert bad_words_token_ids([], tokenizer) == ()


def test_no_redundant_sequences(directories: dict[str, Path]) -> None:
    # Where the space is a token of its own, forbidding the plain word is enough.
    tokenizer = Tokenizer.from_directory(directories["byte_level"])
    found = bad_words_token_ids(["🙈"], tokenizer)
    plain = tuple(tokenizer.encode("🙈", add_special_tokens=False))
    assert plain in found
    assert all(ids == plain or ids[-len(plain) :] != plain for ids in found)


def test_an_empty_word_is_refused(directories: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        bad_words_token_ids(["  "], Tokenizer.from_directory(directories["byte_level"]))
    assert caught.value.param == "bad_words"
