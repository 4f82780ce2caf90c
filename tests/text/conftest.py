"""Small tokenizers of each kind, as model directories that transformers can read too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog.  Two spaces,\ta tab\nand lines.",
    "Grüße aus Köln, naïve café 東京 🙂👩‍👩‍👧 नमस्ते हिन्दी ¿qué? … «ok»",
    'def add(a: int, b: int) -> int: return a + b  # {"name": "add"}',
] * 4


def _save(path: Path, backend: tokenizers.Tokenizer, config: dict[str, object]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def byte_level(path: Path) -> Path:
    """GPT-2 / Llama-3 style, with a bos from the post-processor and added tokens of awkward spelling."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<two words>"), AddedToken("中文词"), AddedToken("naïf"), AddedToken("<tool_call>")])
    backend.add_special_tokens([AddedToken("<|pad token|>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)]
    )
    named = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad token|>"}
    return _save(path, backend, {**named, "tokenizer_class": "PreTrainedTokenizerFast"})


def sentence_piece(path: Path) -> Path:
    """Llama-2 style: `▁` for spaces, one prepended to the text, bytes as a fall-back."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:1] * 4], trainer)
    # The trainer marks the byte tokens as special; in real vocabularies they are ordinary ones.
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save(path, backend, {**named, "tokenizer_class": "PreTrainedTokenizerFast"})


def metaspace(path: Path) -> Path:
    """Unigram with the Metaspace decoder (T5 style)."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _save(
        path, backend, {"eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    )


KINDS = {"byte_level": byte_level, "sentence_piece": sentence_piece, "metaspace": metaspace}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: build(root / name) for name, build in KINDS.items()}


@pytest.fixture(scope="session", params=KINDS)
def directory(request: pytest.FixtureRequest, directories: dict[str, Path]) -> Path:
    return directories[request.param]
