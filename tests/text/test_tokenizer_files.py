"""A directory without a tokenizer.json is converted once, in a process of its own, and kept in the user's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from app.errors import CheckpointError
from app.text import tokenizer_files
from app.text.tokenizer import Tokenizer
from tests.converters.test_convert_tokenizer import LLAMA, train


def test_a_conversion_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    model = train(model_type="bpe", **LLAMA)
    (directory / "tokenizer.model").write_bytes(model)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "add_bos_token": False}))
    tokenizer_files.tokenizer_json.cache_clear()
    tokenizer = Tokenizer.from_directory(directory)
    judge = sentencepiece.SentencePieceProcessor(model_proto=model)  # type: ignore[call-arg]
    assert tokenizer.encode("Grüße 🙂") == judge.encode("Grüße 🙂")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    assert tokenizer.eos_token_id == judge.get_piece_size()  # added behind the others
    tokenizer_files.tokenizer_json.cache_clear()
    monkeypatch.setattr(tokenizer_files, "_convert", None)  # it is not done again
    made = tokenizer_files.tokenizer_json(directory)
    assert made.is_relative_to(tmp_path / "cache")
    assert [path.name for path in made.parent.parent.iterdir()] == [made.parent.name]


def test_what_is_no_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json, nor what it could be made of \(tekken"):
        tokenizer_files.tokenizer_json(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match=r"^cannot convert .*tokenizer\.model") as caught:
        tokenizer_files.tokenizer_json(tmp_path)
    assert caught.value.param == "tokenizer"


def test_a_conversion_without_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_files, "_TIMEOUT_S", 0.01)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(b"slow to read")
    with pytest.raises(CheckpointError, match=r"took longer than 0\.01 s"):
        tokenizer_files.tokenizer_json(directory)
