"""Tokenizer against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.checkpoints.model_info import ASSETS
from app.errors import CheckpointError, InvalidRequestError
from app.text.tokenizer import LONG, Tokenizer

TEXTS = [
    "",
    "Hello, world!",
    "  two leading spaces, trailing \n",
    "naïve café, 東京, नमस्ते, 🙂 and 👩‍👩‍👧",
    "<|bos|>a<|eos|> <s>b</s> <two words> <tool_call>{}",
    "tab\tnew\n\nlines\r\n and nul\x00",
]


def auto(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="session")
def pairs(directories: dict[str, Path]) -> dict[str, tuple[Tokenizer, Any]]:
    """(ours, transformers') for each kind and for the built-in model."""
    paths = {**directories, "tiny-chat": ASSETS / "tiny-chat"}
    return {name: (Tokenizer.from_directory(path), auto(path)) for name, path in paths.items()}


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece", "metaspace", "tiny-chat"])
def test_equals_transformers(kind: str, pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pairs[kind]
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    for index in range(ours.vocab_size):
        assert ours.id_to_token(index) == theirs.convert_ids_to_tokens(index)
        assert ours.token_to_id(ours.id_to_token(index) or "") == index
    assert ours.id_to_token(10**6) is None


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_equals_transformers(text: str, pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    for ours, theirs in pairs.values():
        assert ours.encode(text) == theirs.encode(text)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_bytes_of_byte_level_tokens_concatenate_to_the_decoding(
    data: st.DataObject, pairs: dict[str, tuple[Tokenizer, Any]]
) -> None:
    ours, theirs = pairs["byte_level"]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    text = b"".join(map(ours.token_bytes, ids)).decode("utf-8", "replace")
    assert text == theirs.decode(ids, skip_special_tokens=False)


def test_token_texts_keep_their_space(pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, _ = pairs["sentence_piece"]
    spaced = [index for index in range(ours.vocab_size) if (ours.id_to_token(index) or "").startswith("▁")]
    assert spaced
    for index in spaced:
        assert ours.token_text(index) == (ours.id_to_token(index) or "").replace("▁", " ")
    assert ours.token_bytes(ours.token_to_id("<0xE2>") or 0) == b"\xe2"
    assert ours.token_bytes(ours.vocab_size + 5) == b""


def test_long_texts_take_another_way_to_the_same_ids(pairs: dict[str, tuple[Tokenizer, Any]]) -> None:
    text = " ".join(TEXTS) * 40
    for ours, theirs in pairs.values():
        ids = theirs.encode(text)
        assert len(ids) > LONG
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_a_saved_truncation_does_not_cut_prompts(directories: dict[str, Path], tmp_path: Path) -> None:
    state = json.loads((directories["byte_level"] / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert len(Tokenizer.from_directory(tmp_path).encode("The quick brown fox jumps over the lazy dog.")) > 3


def test_tokens_only_in_the_config_are_added(directories: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directories["byte_level"] / "tokenizer.json").read_bytes())
    config = {
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end of turn|>", "lstrip": False},
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    ours, theirs = Tokenizer.from_directory(tmp_path), auto(tmp_path)
    text = "a<|end of turn|>b"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True) == "ab"


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("count", [1, LONG + 1])
def test_half_a_surrogate_pair_is_refused(count: int) -> None:
    tokenizer = Tokenizer.from_directory(ASSETS / "tiny-chat")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        tokenizer.encode("\ud800" * count)


def test_tokens_that_are_none_are_named(directories: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(directories["byte_level"], tmp_path / "model"))
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": {}}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not usable: eos_token is {}, not a token"):
        Tokenizer.from_directory(directory)


def written(directory: Path, **changes: Any) -> Path:
    """A directory whose tokenizer.json is another."""
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return directory


def test_an_id_that_no_table_could_hold_is_named(directories: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(directories["byte_level"], tmp_path / "model"))
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    model["vocab"]["<far>"] = 4_000_000_000
    with pytest.raises(CheckpointError, match=r"tokenizer\.json .* token id 4000000000, not below 4,194,304"):
        Tokenizer.from_directory(written(directory, model=model))


def test_a_text_that_a_pattern_does_not_split_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    """The library panics, which is no Exception, so that it would end more than the request."""
    directory = Path(shutil.copytree(directories["byte_level"], tmp_path / "model"))
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_directory(written(directory, pre_tokenizer=split))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_plain([text])):
        with pytest.raises(InvalidRequestError, match=r"cannot split this text \(.*retry-limit-in-match over"):
            encode("a" * 60 + " b")
