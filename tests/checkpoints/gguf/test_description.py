"""A GGUF file as a model directory: sizes and names as transformers reads them, logits of its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.checkpoints.gguf.architectures import architecture_of
from app.checkpoints.gguf.description import describe
from app.checkpoints.model_info import ModelInfo, resolve_model
from app.errors import CheckpointError, MantaError, UnsupportedError
from tests.gguf_models import write_gguf
from tests.models.families.expert_variants import MULTIPLIERS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, all_logits

PROMPT = [5, 9, 200, 31, *range(40, 60)]


def logits_of(file: Path) -> torch.Tensor:
    driver = Driver(str(file), num_blocks=16, dtype="float32")
    return all_logits(driver, PROMPT)


def expect_logits(file: Path, judge: torch.nn.Module) -> None:
    with torch.inference_mode():
        expected = judge(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(file), expected, rtol=1e-3, atol=1e-3)


# GGUF's architecture: (family, its changes, metadata).
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16}, {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {"head_dim": 64}, {}),
    "granite": ("granite", {**MULTIPLIERS, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 16}, {}),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True},
        {
            "{arch}.attention.sliding_window": 8,
            "{arch}.attn_logit_softcapping": 50.0,
            "{arch}.final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 6, "tie_word_embeddings": True},
        {"{arch}.attention.sliding_window": 8, "{arch}.rope.freq_base": 1_000_000.0},
    ),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": None}, {"{arch}.attention.sliding_window": 0}),
}
LINEAR: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}
PART: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
}
# As FAMILIES; the converter's metadata of scaling are replaced where `None` is given.
ROTATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linear": ("llama", LINEAR, {}),
    "linear-without-a-kind": ("llama", LINEAR, {"{arch}.rope.scaling.type": None}),
    "linear-of-2023": (
        "llama",
        LINEAR,
        {"{arch}.rope.scaling.type": None, "{arch}.rope.scaling.factor": None, "{arch}.rope.scale_linear": 4.0},
    ),
    "part-of-a-head": ("phi3", {"pad_token_id": 0, "sliding_window": None, **PART}, {}),
}


HEAD_DIMS = ("{arch}.attention.key_length", "{arch}.attention.value_length", "{arch}.rope.dimension_count")


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_as_files_have_them(name: str, tmp_path: Path) -> None:
    family, changes, metadata = ROTATIONS[name]
    file = tmp_path / "model.gguf"
    expect_logits(file, write_gguf(tiny_model(family, **changes), file, family, lambda name: "F32", metadata))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.attention.head_count": "x"}, r"llama\.attention\.head_count is 'x', not a size"),
        ({"{arch}.attention.head_count": 0}, r"llama\.attention\.head_count is 0, not a size"),
        ({"{arch}.attention.head_count_kv": [2, 1]}, r"head_count_kv differs from layer to layer: \[2, 1\]"),
        ({"{arch}.rope.freq_base": "x"}, r"llama\.rope\.freq_base is 'x', not a number"),
        ({"{arch}.rope.freq_base": float("nan")}, r"llama\.rope\.freq_base is nan, not a number"),
        ({"{arch}.rope.dimension_count": 4096}, r"rope\.dimension_count is 4096, more than a head's 32"),
        ({"{arch}.rope.scaling.type": 7, "{arch}.rope.scaling.factor": 2.0}, r"scaling\.type is 7, not a text"),
        (dict.fromkeys(HEAD_DIMS, 24), r"q_proj\.weight has shape \[64, 64\], no heads of 24"),
        ({"{arch}.attention.key_length": -4}, r"attention\.key_length is -4, not a size"),
        ({"tokenizer.ggml.tokens": 5}, r"tokenizer\.ggml\.tokens is no list of texts"),
        ({"tokenizer.chat_template": 7}, r"tokenizer\.chat_template is no text"),
    ],
)
def test_metadata_of_another_type_are_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), file, "llama", lambda name: "F32", metadata)
    with pytest.raises(MantaError, match=message):
        describe(file)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_of_every_family(architecture: str, tmp_path: Path) -> None:
    family, changes, metadata = FAMILIES[architecture]
    judge = write_gguf(
        tiny_model(family, **changes), tmp_path / "model.gguf", architecture, lambda name: "F32", metadata
    )
    expect_logits(tmp_path / "model.gguf", judge)


def test_transformers_reads_the_same_file(tmp_path: Path) -> None:
    """Names, permutation and sizes against a reader that is not ours, over 16-bit types."""
    source = tiny_model("llama", num_key_value_heads=2, num_attention_heads=4, head_dim=16)
    kinds = {"attn_q": "F16", "token_embd": "BF16", "ffn_down": "BF16"}
    file = tmp_path / "model.gguf"
    write_gguf(source, file, "llama", lambda name: kinds.get(name.split(".")[-2], "F32"))
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    expect_logits(file, AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval())
    ours, theirs = ModelInfo.from_directory(str(file)), AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    for name in ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size"):
        own = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads"}.get(name, name)
        assert getattr(ours, name) == getattr(theirs, own), name


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = tiny_model("llama", rope_parameters=scaling)
    judge = write_gguf(source, tmp_path / "model.gguf", "llama", lambda name: "F32", rope_freqs=judge_factors(source))
    expect_logits(tmp_path / "model.gguf", judge)


def judge_factors(source: Path) -> torch.Tensor:
    """By what llama.cpp divides the frequencies: transformers' unscaled ones by its scaled ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = config.head_dim
    plain = 1.0 / 10_000.0 ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain / scaled


def test_a_split_model_is_one(tmp_path: Path) -> None:
    source = tiny_model("llama")
    judge = write_gguf(source, tmp_path / "m.gguf", "llama", lambda name: "F32", shards=2)
    assert (tmp_path / "m-00002-of-00002.gguf").is_file()
    expect_logits(tmp_path / "m-00002-of-00002.gguf", judge)
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    describe.cache_clear()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf is missing: the model is split into 2"):
        describe(tmp_path / "m-00001-of-00002.gguf")


def test_it_is_described_once_until_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama"), file, "llama", lambda name: "F32")
    first = describe(file)
    describe.cache_clear()
    assert describe(file) == first
    write_gguf(tiny_model("llama", seed=1, vocab_size=340), file, "llama", lambda name: "F32")
    describe.cache_clear()
    assert describe(file) != first
    assert ModelInfo.from_directory(str(file)).vocab_size == 340


def test_special_tokens_and_template(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<|eot|>"],
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": -9,  # llama.cpp passes over such
        "tokenizer.ggml.eom_token_id": 1 << 30,
        "tokenizer.chat_template": "{{ messages }}",
    }
    write_gguf(tiny_model("llama"), file, "llama", lambda name: "F32", metadata)
    directory = describe(file)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config == {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    assert ModelInfo.from_directory(str(file)).eos_token_ids == (1, 2)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    source = tiny_model("llama")
    write_gguf(
        source,
        file,
        "llama",
        lambda name: "F32",
        {"{arch}.rope.scaling.type": "odd", "{arch}.rope.scaling.factor": 2.0},
    )
    with pytest.raises(UnsupportedError, match=r"GGUF: rope\.scaling\.type 'odd' is not supported"):
        describe(file)
    write_gguf(source, file, "llama", lambda name: "F32", {"{arch}.attention.value_length": 16})
    describe.cache_clear()
    with pytest.raises(UnsupportedError, match="GGUF: values of 16 with keys of 32"):
        describe(file)
    with pytest.raises(UnsupportedError, match=r"unknown general\.architecture \['llama'\]"):
        architecture_of({"general.architecture": ["llama"]})
    content = file.read_bytes()
    file.write_bytes(content.replace(b"llama", b"xlama"))
    describe.cache_clear()
    with pytest.raises(UnsupportedError, match=r"unknown general\.architecture 'xlama'; known: deepseek2, dots1, "):
        describe(file)


def test_a_directory_of_files_names_them(tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "a.gguf", "llama", lambda name: "F32")
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"give one of its GGUF files: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))
