"""Tokenizers of GGUF metadata: the tokens of the tokenizer that the metadata were made of, for any text."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import sentencepiece
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import (  # type: ignore[attr-defined]
    SentencePieceExtractor,
    TikTokenConverter,
)

from app.cli import main
from app.converters.gguf_tokenizer import _SPLITS
from app.text.tokenizer import Tokenizer
from tests.converters.test_convert_tokenizer import SENTENCEPIECE, TEXTS, converted, train
from tests.text.conftest import CORPUS

# Where the patterns stand elsewhere: transformers' Llama 3 and Qwen 2, tiktoken's o200k, Mistral's tekken.json.
LLAMA3 = TikTokenConverter().pattern
with mock.patch.object(tiktoken_ext.openai_public, "load_tiktoken_bpe", return_value={}):
    O200K = tiktoken_ext.openai_public.o200k_base()["pat_str"]
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    by_pattern = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([by_pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def digits_first() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2()])


def deepseek() -> Any:
    """As the tokenizer.json of DeepSeek-V3 has it."""
    words = (
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
        " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
    )
    patterns = ["\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, split(words)])


SPLITS: dict[str, Callable[[], Any]] = {
    "llama-bpe": lambda: split(LLAMA3),
    "dbrx": lambda: split(LLAMA3),
    "smaug-bpe": lambda: split(LLAMA3),
    "glm4": lambda: split(LLAMA3),
    "chatglm-bpe": lambda: split(LLAMA3),
    "qwen2": lambda: split(LLAMA3.replace("{1,3}", "")),
    "deepseek-r1-qwen": lambda: split(LLAMA3.replace("{1,3}", "")),
    "tekken": lambda: split(TEKKEN),
    "gpt-4o": lambda: split(O200K),
    "llama4": lambda: split(O200K),
    "gpt-2": gpt2,
    "phi-2": gpt2,
    "olmo": gpt2,
    "smollm": digits_first,
    "refact": digits_first,
    "deepseek-v3": deepseek,
}


def write(directory: Path, **metadata: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    content = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    (directory / "gguf_tokenizer.json").write_text(json.dumps(content))
    return directory


@functools.cache
def byte_level(pre: str, root: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """(ours, the one that the metadata describe)."""
    judge = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    judge.pre_tokenizer = SPLITS[pre]()
    judge.normalizer = normalizers.NFC() if "qwen" in pre or pre == "olmo" else None
    judge.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    judge.train_from_iterator([*CORPUS, "WORLD Don't 123456 don't//\n\n"] * 2, trainer)
    judge.add_tokens([AddedToken("<|bos|>", special=True, normalized=False), AddedToken("<tool>", normalized=False)])
    model = json.loads(judge.to_str())["model"]
    added = {token.content: 3 if token.special else 4 for token in judge.get_added_tokens_decoder().values()}
    vocab = judge.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    directory = write(
        root / pre,
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[added.get(token, 1) for token in tokens],
        merges=[" ".join(merge) for merge in model["merges"]],
    )
    return converted(directory), judge


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def test_every_way_to_split_is_judged() -> None:
    assert SPLITS.keys() == _SPLITS.keys()


@pytest.mark.parametrize("pre", SPLITS)
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=40) | st.text("abDON'tl /\n\t912 東🙂<", max_size=30))
def test_any_text_has_the_tokens_of_its_tokenizer(pre: str, root: Path, text: str) -> None:
    ours, judge = byte_level(pre, root)
    ids = judge.encode(text).ids
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=False) == judge.decode(ids, skip_special_tokens=False)


def test_added_tokens_are_single(root: Path) -> None:
    ours, judge = byte_level("qwen2", root)
    ids = judge.encode("a<|bos|>b<tool>").ids
    assert ours.encode("a<|bos|>b<tool>") == ids
    assert ours.special_token_ids == {judge.token_to_id("<|bos|>")}


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_sentencepiece_in_metadata(kind: str, tmp_path: Path) -> None:
    model = train(**SENTENCEPIECE[kind])
    (tmp_path / "judge.model").write_bytes(model)
    proto = SentencePieceExtractor(str(tmp_path / "judge.model")).proto
    judge = sentencepiece.SentencePieceProcessor(model_proto=model)  # type: ignore[call-arg]
    directory = write(
        tmp_path / "gguf",
        model="llama",
        tokens=[piece.piece for piece in proto.pieces],
        scores=[piece.score for piece in proto.pieces],
        token_type=[piece.type for piece in proto.pieces],
        bos_token_id=judge.bos_id(),
        eos_token_id=judge.eos_id(),
        unknown_token_id=judge.unk_id(),
        add_space_prefix=kind == "llama",
    )
    ours = converted(directory)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == judge.encode(text)
        assert ours.decode(judge.encode(text), skip_special_tokens=False) == judge.decode(judge.encode(text))
    assert ours.encode("a") == [judge.bos_id(), *judge.encode("a")]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"model": "bert", "tokens": ["a"]}, "tokenizer.ggml.model 'bert' is not supported (known: llama, gpt2)"),
        ({"model": "gpt2", "pre": "odd", "tokens": ["a"]}, "tokenizer.ggml.pre 'odd' is not known (known: chatglm-bpe"),
        ({"model": "gpt2", "pre": "qwen2", "tokens": ["a"], "token_type": [1, 1]}, "1 tokens, 1 scores, 2 types"),
        ({"model": "gpt2", "pre": "qwen2", "tokens": []}, "do not go together: 0 tokens"),
    ],
)
def test_what_cannot_be_made_says_why(
    metadata: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, **metadata)
    assert main(["convert-tokenizer", str(tmp_path), str(tmp_path / "made")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("manta: error: ")
    assert reason in line
