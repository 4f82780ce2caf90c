"""Incremental detokenisation against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import codecs
import itertools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, reject, settings
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
        assert "".join(deltas(tokenizer, ids, skip)) == decoded(tokenizer, ids, skip)


@pytest.mark.parametrize("ids", [[131, 35], [131, 35, 35], [131, 131, 35, 99]])
def test_a_space_behind_a_broken_byte_begins_no_text(ids: list[int], sentence_piece: Tokenizer) -> None:
    """Bytes 0x80 and 0x20: decoders take away one space from the beginning of a text."""
    assert "".join(deltas(sentence_piece, ids, False)) == decoded(sentence_piece, ids, False)


def each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler: a mark for each broken byte."""
    assert isinstance(error, UnicodeDecodeError)
    return MARK * (error.end - error.start), error.end


MARK = "\x01"
codecs.register_error("each_byte", each_byte)


def decoded(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The text of the whole, with U+FFFD for the broken bytes of a run of byte tokens only, not for all of the run."""
    if not tokenizer.byte_fallback_ids:
        return tokenizer.decode(ids, skip_special_tokens=skip)
    silent = tokenizer.special_token_ids if skip else frozenset[int]()
    heard = [i for i in ids if i not in silent and i < tokenizer.vocab_size]
    mended: list[int] = []
    for is_byte, run in itertools.groupby(heard, key=tokenizer.byte_fallback_ids.__contains__):
        if is_byte:
            raw = b"".join(map(tokenizer.token_bytes, run))
            if MARK.encode() in raw:
                reject()
            run = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in raw.decode("utf-8", "each_byte").encode())  # type: ignore[misc]
        mended += run
    return tokenizer.decode(mended, skip_special_tokens=skip).replace(MARK, "\ufffd")


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


@pytest.mark.parametrize("text", ["🙂東京🙂" * 20, "東 京 a🙂", "ü"])
def test_characters_of_byte_tokens_come_as_soon_as_they_are_whole(sentence_piece: Tokenizer, text: str) -> None:
    """280 byte tokens brought no text before the end."""
    ids = [sentence_piece.token_to_id(f"<0x{byte:02X}>") or 0 for byte in text.encode()]
    parts = deltas(sentence_piece, ids)
    assert [part for part in parts if part] == list(text)
    assert parts[-1] == ""


def test_a_broken_byte_breaks_no_other_character(sentence_piece: Tokenizer) -> None:
    raw = "東".encode() + b"\xff" + "京".encode() + b"\xe6\x9d"
    ids = [sentence_piece.token_to_id(f"<0x{byte:02X}>") or 0 for byte in raw]
    assert "".join(deltas(sentence_piece, ids)) == "東\ufffd京\ufffd\ufffd"


def test_what_says_nothing_is_not_decoded_again_with_each_token(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are U+FFFD themselves, and tokens without text, used to wait for what would complete them."""
    backend = tokenizers.Tokenizer.from_file(str(directories["sentence_piece"] / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("\ufffd", normalized=False)])
    mark = backend.token_to_id("\ufffd")
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        (directories["sentence_piece"] / "tokenizer_config.json").read_text()
    )
    tokenizer = Tokenizer.from_directory(tmp_path)
    word = tokenizer.encode("fox", add_special_tokens=False)
    many = [[mark] * 300, [*word, *[mark] * 299], ([mark] * 40 + word) * 6]
    decode, count = Tokenizer.decode, 0

    def counted(self: Tokenizer, token_ids: list[int], *args: bool, **named: bool) -> str:
        nonlocal count
        count += len(token_ids)
        return decode(self, token_ids, *args, **named)

    for ids in many:
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "decode", counted)
            count = 0
            said = deltas(tokenizer, ids)
        assert "".join(said) == decoded(tokenizer, ids, True)
        assert count < 50 * len(ids)
        assert max(map(len, said)) < 40, "it is held back for good"
