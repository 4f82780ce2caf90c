"""Texts that cannot fit are refused or cut early, and no others; the whole text's tokens are the judge."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.errors import PromptTooLongError
from app.text import prompt_size
from app.text.prompt_size import TextRoom
from app.text.tokenizer import Tokenizer

WORDS = [
    "The ",
    "quick",
    " brown fox",
    "Grüße",
    "東京",
    "🙂",
    "  ",
    "\n",
    "naïve",
    "<two words>",
    "aaaa",
    "def add(a: int)",
]


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are handled as long ones are."""
    monkeypatch.setattr(prompt_size, "PIECE_CHARS", 700)
    monkeypatch.setattr(prompt_size, "COMMON_CHARS_PER_TOKEN", 0)


def texts(number: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(WORDS, k=rng.randrange(1, 3000))) for _ in range(number)]


def test_only_texts_that_have_too_many_tokens_are_refused(tokenizer: Tokenizer) -> None:
    num_refused = 0
    for text in texts(30):
        count = len(tokenizer.encode(text, add_special_tokens=False))
        assert TextRoom(count).fit(tokenizer, text) == text
        num_refused += _is_refused(TextRoom(count // 2), tokenizer, text)
    assert num_refused > 10


def _is_refused(room: TextRoom, tokenizer: Tokenizer, text: str) -> bool:
    try:
        return room.fit(tokenizer, text) != text
    except PromptTooLongError:
        return True


@pytest.mark.parametrize("keeps", ["first", "last"])
def test_what_is_kept_of_a_long_text_has_the_tokens_of_the_whole(tokenizer: Tokenizer, keeps: str) -> None:
    num_cut = 0
    for text in texts(30):
        whole = tokenizer.encode(text, add_special_tokens=False)
        for room in (1, 50, len(whole) // 3 + 1):
            part = TextRoom(room, keeps).fit(tokenizer, text)  # type: ignore[arg-type]
            num_cut += len(part) < len(text)
            found = tokenizer.encode(part, add_special_tokens=False)
            assert (found[:room] == whole[:room]) if keeps == "first" else (found[-room:] == whole[-room:])
    assert num_cut > 30


def test_too_many_characters_are_refused_unread(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("the text is read"))
    room = TextRoom(10, what="the model's context", field="input")
    with pytest.raises(PromptTooLongError, match="the model's context holds 10 tokens") as error:
        room.fit(tokenizer, "a" * (10 * tokenizer.max_chars_per_token + 1))
    assert error.value.param == "input"


def test_no_token_stands_for_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    for text in texts(20):
        assert len(text) <= tokenizer.max_chars_per_token * len(tokenizer.encode(text, add_special_tokens=False))
