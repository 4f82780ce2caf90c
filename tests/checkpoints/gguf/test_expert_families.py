"""GGUF files of families with experts against transformers with the numbers that they stand for.

CI takes a few; `make acceptance` takes all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.latent import join_keys_and_values
from app.errors import CheckpointError, MantaError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

# Of whole blocks of 32.
WIDE = {"intermediate_size": 96}
EXPERTS = {"moe_intermediate_size": 64}
LATENT = {**WIDE, **EXPERTS, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
LLAMA4 = {**WIDE, "attn_scale": 0.1, "floor_scale": 8192}
# GGUF's architecture, the variant of tests/models/families/expert_variants.py, changes to it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", {**WIDE, "sliding_window": None, "num_attention_heads": 4}),
    "mixtral-of-2023": ("llama", "mixtral", {**WIDE, "sliding_window": None, "one_by_one": True}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {**WIDE, **EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {**WIDE, **EXPERTS}),
    "qwen3moe-fused": ("qwen3moe", "qwen3_moe", {**WIDE, **EXPERTS, "fused": True}),
    "olmoe": ("olmoe", "olmoe-unclipped", WIDE),
    "granitemoe": ("granitemoe", "granitemoe", {**WIDE, "num_attention_heads": 4, "head_dim": 16}),
    "granitemoe-shared": ("granitemoe", "granitemoeshared", {**WIDE, "shared_intermediate_size": 64}),
    "gpt-oss": ("gpt-oss", "gpt_oss", WIDE),
    "glm4moe": ("glm4moe", "glm4_moe", {**WIDE, **EXPERTS}),
    "glm4moe-groups": ("glm4moe", "glm4_moe-groups", {**WIDE, **EXPERTS}),
    "dots1": ("dots1", "dots1-groups", {**WIDE, **EXPERTS}),
    "ernie4_5-moe": ("ernie4_5-moe", "ernie4_5_moe-every-second", {**WIDE, **EXPERTS, "moe_num_shared_experts": 1}),
    "llama4": ("llama4", "llama4", LLAMA4),
    "llama4-sparse": ("llama4", "llama4-sparse", LLAMA4),
    "deepseek2-v2": ("deepseek2", "deepseek_v2-groups", {**LATENT, "q_lora_rank": None}),
    "deepseek2-v2-of-2024": ("deepseek2", "deepseek_v2-groups", {**LATENT, "not_split": True}),
    "deepseek2-glm": ("deepseek2", "glm4_moe_lite", LATENT),
    "deepseek2-v3": ("deepseek2", "deepseek_v3", LATENT),
}
SAMPLE = ("qwen2moe", "gpt-oss", "deepseek2-v3")
# Gates of another type than what they let through, as in some mixes.
TYPES = {
    **{"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q5_1", "ffn_down_exps": "Q8_0", "ffn_up_shexp": "Q5_1"},
    **{"attn_v": "Q8_0", "attn_k_b": "Q8_0", "attn_v_b": "Q5_0", "*": "Q8_0"},
}


def types(name: str, mix: dict[str, str] = TYPES) -> str:
    parts = name.split(".")
    return "Q4_0" if parts[-2].isdigit() and int(parts[-2]) % 2 else mix.get(parts[-2], mix["*"])


def write(family: str, file: Path, mix: dict[str, str] = TYPES, metadata: dict[str, Any] | None = None) -> Any:
    architecture, variant, changes = FAMILIES[family]
    kind, sizes = EXPERT_VARIANTS[variant]
    source = tiny_model(kind, **{**sizes, "initializer_range": 0.1, **changes})
    return write_gguf(source, file, architecture, lambda name: types(name, mix), metadata)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in SAMPLE else pytest.mark.slow) for family in FAMILIES]
)
def test_logits_are_those_of_its_weights(family: str, tmp_path: Path) -> None:
    mix = {**TYPES, "ffn_up_exps": "MXFP4", "ffn_gate_exps": "MXFP4"} if family == "gpt-oss" else TYPES
    expect_logits(tmp_path / "model.gguf", write(family, tmp_path / "model.gguf", mix))


def test_what_lies_behind_the_last_layer_is_left_out(tmp_path: Path) -> None:
    """A file counts the layers that predict further tokens, too."""
    file = tmp_path / "model.gguf"
    judge = write("glm4moe", file, metadata={"{arch}.block_count": 3, "{arch}.nextn_predict_layers": 1})
    judge.model.layers = judge.model.layers[:2]
    expect_logits(file, judge)


UNUSABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "more experts": (
        "qwen3moe",
        {"{arch}.expert_count": 8},
        r"the checkpoint lacks model\.layers\.0\.mlp\.experts\.7\.",
    ),
    "fewer experts": ("qwen3moe", {"{arch}.expert_count": 6}, r"unexpected model\.layers\.0\.mlp\.experts\.6\."),
    "fewer layers": ("qwen3moe", {"{arch}.block_count": 1}, r"unexpected model\.layers\.1\."),
    "no layers": ("glm4moe", {"{arch}.nextn_predict_layers": 3}, r"nextn_predict_layers is 3 of 3 layers"),
    "no experts": ("qwen3moe", {"{arch}.expert_count": None}, r"the metadata lack qwen3moe\.expert_count"),
    "another width": (
        *("qwen3moe", {"{arch}.expert_feed_forward_length": 96}),
        r"experts\.gate_proj\.weight in .* has shape \[64, 2, 18\], the model expects \[96, 2, 18\]",
    ),
    "another gate": (
        "deepseek2-v3",
        {"{arch}.expert_gating_func": 3},
        r"expert_gating_func is 3; known: 1 \(softmax\)",
    ),
    "another scale": (
        *("deepseek2-v3", {"{arch}.attention.temperature_scale": 0.1}),
        r"attention\.temperature_scale is not supported in deepseek2",
    ),
    "no flag": ("deepseek2-v3", {"{arch}.expert_weights_norm": 1}, r"expert_weights_norm is 1, not true or false"),
    "another latent": (
        *("deepseek2-v3", {"{arch}.attention.kv_lora_rank": 32}),
        r"kv_a_proj_with_mqa\.weight in .* has shape",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_does_not_go_together_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, metadata, message = UNUSABLE[name]
    write(family, tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(MantaError, match=message):
        Driver(str(tmp_path / "model.gguf"), num_blocks=16)


def test_keys_without_values_are_refused_by_name() -> None:
    keys = {"shape": [4, 64, 32]}
    places = {"a.k_b_proj.weight": keys}
    with pytest.raises(CheckpointError, match=r"has a\.k_b_proj\.weight, but lacks a\.v_b_proj\.weight"):
        join_keys_and_values(places)
    with pytest.raises(CheckpointError, match=r"has shape \[4, 64, 32\], its values \[4, 16, 32\]"):
        join_keys_and_values({**places, "a.v_b_proj.weight": {"shape": [4, 16, 32]}})
