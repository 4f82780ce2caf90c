"""Incremental detokenisation against the tokenizer's own decoding of the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.detokenizer import create_detokenizer
from app.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level(directories: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_directory(directories["byte_level"])


@pytest.fixture(scope="session")
def sentence_piece(directories: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_directory(directories["sentence_piece"])


@pytest.fixture(scope="session")
def kinds(directories: dict[str, Path]) -> list[Tokenizer]:
    return [Tokenizer.from_directory(path) for path in directories.values()]


def deltas(tokenizer: Tokenizer, ids: list[int], skip: bool = True, prompt: list[int] | None = None) -> list[str]:
    detokenizer = create_detokenizer(tokenizer, skip, prompt or [])
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@settings(max_examples=400, deadline=None)
@given(text=st.text(max_size=60), skip=st.booleans())
def test_deltas_of_any_text_concatenate(text: str, skip: bool, kinds: list[Tokenizer]) -> None:
    for tokenizer in kinds:
        ids = tokenizer.encode(text)
        assert "".join(deltas(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_any_tokens_concatenate(data: st.DataObject, skip: bool, kinds: list[Tokenizer]) -> None:
    # Random ids: broken bytes, special tokens in the middle of characters, ids that do not exist.
    for tokenizer in kinds:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
        assert "".join(deltas(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(prompt=st.text(min_size=1, max_size=30), output=st.text(min_size=1, max_size=30))
def test_output_continues_the_prompt(prompt: str, output: str, sentence_piece: Tokenizer) -> None:
    tokenizer = sentence_piece
    ids = tokenizer.encode(prompt)
    new = tokenizer.encode("a" + output, add_special_tokens=False)[1:]  # as a model goes on within a text
    if any(token in tokenizer.byte_fallback_ids for token in (ids[-1], new[0] if new else 0)):
        return  # a character cut by the border belongs to neither side
    whole = tokenizer.decode([*ids, *new])
    assert tokenizer.decode(ids) + "".join(deltas(tokenizer, new, prompt=ids)) == whole


def test_no_delta_ends_in_half_a_character(byte_level: Tokenizer) -> None:
    text = "a 東京 🙂👩‍👩‍👧 नमस्ते ü"
    parts = deltas(byte_level, [i for char in text for i in byte_level.encode(char, add_special_tokens=False)])
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) == text
    held = deltas(byte_level, byte_level.encode("🙈", add_special_tokens=False))
    assert len(held) > 2, "the emoji must take several tokens for this test to mean something"
    assert [part for part in held if part] == ["🙈"]


def test_an_unfinished_character_is_one_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok🙈", add_special_tokens=False)[:-1]
    parts = deltas(byte_level, ids)
    assert "".join(parts) == byte_level.decode(ids) == "ok\ufffd"
    assert parts[-1] == "\ufffd"


def test_complete_tokens_are_not_delayed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("The quick brown fox", add_special_tokens=False)
    assert all(deltas(byte_level, ids)[:-1])


def test_a_long_run_of_bytes_stays_linear(sentence_piece: Tokenizer) -> None:
    ids = [sentence_piece.token_to_id("<0xFF>") or 0] * 20_000
    assert "".join(deltas(sentence_piece, ids)) == "\ufffd" * 20_000
