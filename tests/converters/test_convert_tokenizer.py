"""`manta convert-tokenizer`: the result gives the tokens that each form's own library gives, for any text."""

from __future__ import annotations

import base64
import functools
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import TikTokenConverter  # type: ignore[attr-defined]

from app.cli import main
from app.text.tokenizer import Tokenizer
from tests.text.conftest import CORPUS

TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  a  b ",
    "\n\n",
    "\x00\ufffd",
    "🙂👩‍👩‍👧",
    "12345",
    "it's WE'LL",
    "<mask>x",
    "a\u00a0b",
]
LLAMA: dict[str, Any] = {"byte_fallback": True, "split_digits": True, "remove_extra_whitespaces": False}
LLAMA |= {"allow_whitespace_only_pieces": True, "normalization_rule_name": "identity"}
GEMMA = {**LLAMA, "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
GEMMA |= {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}
GEMMA["user_defined_symbols"] = ["<mask>", "<start_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁"]
SENTENCEPIECE = {
    "llama": {"model_type": "bpe", **LLAMA},
    "gemma": {"model_type": "bpe", **GEMMA},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "vocab_size": 420},
}


def train(**options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        **{"vocab_size": 450, "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1, **options},
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
    )
    return model.getvalue()


def converted(directory: Path) -> Tokenizer:
    assert main(["convert-tokenizer", str(directory), str(directory / "made")]) == 0
    return Tokenizer.from_directory(directory / "made")


def ranks() -> dict[bytes, int]:
    """Bytes, and pairs of what is there already: ranks as tiktoken's training gives them."""
    rng = random.Random(5)
    pieces = [bytes([byte]) for byte in rng.sample(range(256), 256)]
    words = " ".join(CORPUS).encode()
    while len(pieces) < 500:
        start = rng.randrange(len(words) - 8)
        found = [piece for piece in pieces if words.startswith(piece, start)]
        left = max(found, key=len)
        right = max((piece for piece in pieces if words.startswith(piece, start + len(left))), key=len)
        if left + right not in pieces:
            pieces.append(left + right)
    return {piece: rank for rank, piece in enumerate(pieces)}


def as_tiktoken(file: Path) -> Path:
    file.write_text("".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks().items()))
    return file.parent


@functools.cache
def case(kind: str, root: Path) -> tuple[Tokenizer, Callable[[str], list[int]], Callable[[list[int]], str]]:
    """(ours, the judge's tokens, the judge's text)."""
    directory = root / kind
    directory.mkdir(exist_ok=True)
    if kind in SENTENCEPIECE:
        model = train(**SENTENCEPIECE[kind])
        (directory / "tokenizer.model").write_bytes(model)
        judge = sentencepiece.SentencePieceProcessor(model_proto=model)  # type: ignore[call-arg]
        return converted(directory), judge.encode, judge.decode
    pattern = TikTokenConverter().pattern
    shift = 0
    if kind == "tekken":
        shift = 10
        special = [{"rank": i, "token_str": text} for i, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))]
        vocab = [
            {"rank": r, "token_bytes": base64.b64encode(p).decode(), "token_str": None} for p, r in ranks().items()
        ]
        config = {"pattern": pattern, "default_vocab_size": 480, "default_num_special_tokens": shift, "version": "v7"}
        content = {"config": config, "special_tokens": special, "vocab": vocab}
        (directory / "tekken.json").write_text(json.dumps(content))
    else:
        as_tiktoken(directory / kind)
    kept = {piece: rank for piece, rank in ranks().items() if kind != "tekken" or rank < 480 - shift}
    encoding = tiktoken.Encoding("judge", pat_str=pattern, mergeable_ranks=kept, special_tokens={})
    return (
        converted(directory),
        lambda text: [shift + token for token in encoding.encode_ordinary(text)],
        lambda tokens: encoding.decode([token - shift for token in tokens]),
    )


KINDS = [*SENTENCEPIECE, "any.tiktoken", "tokenizer.model", "tekken"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text("ab lo\n\t'9 東🙂<", max_size=30))
def test_any_text_has_the_tokens_of_the_forms_own_library(kind: str, root: Path, text: str) -> None:
    ours, encode, _ = case(kind, root)
    assert ours.encode(text, add_special_tokens=False) == encode(text)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_back(kind: str, root: Path) -> None:
    ours, encode, decode = case(kind, root)
    for text in TEXTS:
        ids = encode(text)
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == decode(ids)


def test_special_tokens_are_single_and_stand_before_a_text(root: Path) -> None:
    for kind, text, bos in (
        ("llama", "<s>a</s>", "<s>"),
        ("gemma", "<bos>a<eos>", "<bos>"),
        ("tekken", "<s>a</s>", "<s>"),
    ):
        ours, encode, _ = case(kind, root)
        first, last = ours.token_to_id(bos), ours.eos_token_id
        assert first is not None
        assert ours.encode(text, add_special_tokens=False) == [first, *encode("a"), last]
        assert ours.encode("a") == [first, *encode("a")]
        assert {first, last} <= ours.special_token_ids
        assert ours.special_tokens["bos_token"] == bos
        assert ours.decode([first, *encode("a")]) == "a"


def test_tokens_and_ends_of_the_configuration(tmp_path: Path) -> None:
    added = {"500": {"content": "<|begin|>", "special": True}, "502": {"content": "<|end|>", "special": True}}
    config = {"added_tokens_decoder": added, "bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": True}
    (as_tiktoken(tmp_path / "tokenizer.model") / "tokenizer_config.json").write_text(json.dumps(config))
    ours = converted(tmp_path)
    ids = ours.encode("a<|end|>")
    assert (ids[0], ids[-1], ours.id_to_token(501)) == (500, 502, "<|reserved_token_501|>")


def test_older_files(tmp_path: Path) -> None:
    """GPT-2's, as transformers' own class writes its tokenizer.json."""
    from transformers import AutoTokenizer

    tokens = ["<|endoftext|>", *sorted("abcdĠ"), "ab", "Ġab"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    judge = AutoTokenizer.from_pretrained(tmp_path)
    assert converted(tmp_path).encode("ab ab cd<|endoftext|>") == judge.encode("ab ab cd<|endoftext|>")


def damaged(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(b"no model")


def needs_code(directory: Path) -> None:
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (as_tiktoken(directory / "own.tiktoken") / "tokenizer_config.json").write_text(json.dumps(config))


def of_words(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(train(model_type="word", vocab_size=40))


def lower_case(directory: Path) -> None:
    """Suffixes instead of prefixes: the converters know nothing of them."""
    (directory / "tokenizer.model").write_bytes(train(model_type="bpe", treat_whitespace_as_suffix=True, **LLAMA))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (damaged, r"cannot convert .*tokenizer\.model"),
        (needs_code, "how OwnTokenizer splits a text says its code only, which is not run"),
        (of_words, "only unigram and BPE models can be converted"),
        (lower_case, "would become other tokens than sentencepiece gives"),
        (lambda directory: None, r"holds no tokenizer\.json, nor what it could be made of"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_converted_says_why_in_one_line(
    make: Callable[[Path], None], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert main(["convert-tokenizer", str(tmp_path), str(tmp_path / "made")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("manta: error: ")
    assert re.search(reason, line), line
    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_the_configuration_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(model_type="bpe", **LLAMA))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "mine", "eos_token": "<|end|>"}')
    assert main(["convert-tokenizer", str(tmp_path), str(tmp_path / "made")]) == 0
    made = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert (made["chat_template"], made["eos_token"], made["bos_token"]) == ("mine", "<|end|>", "<s>")


def test_what_is_no_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["convert-tokenizer", "tiny-chat", str(tmp_path)]) != 0
    assert "tiny-chat is no directory" in capsys.readouterr().err


def test_files_of_a_model_are_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    own = tmp_path / "tokenizer_config.json"
    own.write_text('{"chat_template": "mine"}')
    assert main(["convert-tokenizer", str(tmp_path), str(tmp_path)]) != 0
    assert "holds a tokenizer_config.json already" in capsys.readouterr().err
    assert own.read_text() == '{"chat_template": "mine"}'
