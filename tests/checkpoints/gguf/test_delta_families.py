"""GGUF files of Qwen3-Next, Qwen 3.5 and 3.6 against transformers with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.gguf.description import describe
from app.errors import CheckpointError
from tests.checkpoints.gguf.test_description import expect_logits
from tests.gguf_models import write_gguf
from tests.models.families.state_variants import DELTA, EXPERTS
from tests.tiny_models import tiny_model

# Of whole blocks of 32, but for heads of values, of which the second form has several in a block.
WIDE = {**DELTA, "intermediate_size": 96, "initializer_range": 0.1, "linear_num_value_heads": 6}
HEADS = {"blocks": {"linear_value_head_dim": 32}, "within blocks": {"linear_value_head_dim": 16}}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", {**WIDE, "tie_word_embeddings": True}),
    "qwen35moe": ("qwen3_5_moe_text", {**WIDE, **EXPERTS, "moe_intermediate_size": 64}),
    "qwen3next": ("qwen3_next", {**WIDE, **EXPERTS, "moe_intermediate_size": 64}),
}
FAMILIES["qwen35moe"][1]["shared_expert_intermediate_size"] = 32
FAMILIES["qwen3next"][1]["shared_expert_intermediate_size"] = 32


def write(family: str, file: Path, heads: str, metadata: dict[str, Any] | None = None) -> Any:
    kind, sizes = FAMILIES[family]

    def types(name: str) -> str:
        return "F32" if "ffn_gate_inp" in name else "Q4_0" if "attn_qkv" in name else "Q8_0"

    return write_gguf(tiny_model(kind, **{**sizes, **HEADS[heads]}), file, family, types, metadata)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_its_weights(family: str, heads: str, tmp_path: Path) -> None:
    expect_logits(tmp_path / "model.gguf", write(family, tmp_path / "model.gguf", heads))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"{arch}.ssm.inner_size": 100}, r"ssm\.inner_size is 100, no 6 heads"),
        ({"{arch}.ssm.group_count": None}, r"the metadata lack qwen35\.ssm\.group_count"),
        ({"{arch}.ssm.group_count": 4}, r"in_proj_qkv\.weight has shape \[256, 64\], not 320 rows"),
        ({"{arch}.ssm.time_step_rank": 3}, r"3 heads of values for 2 of keys"),
    ],
)
def test_what_does_not_go_together_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    write("qwen35", tmp_path / "model.gguf", "blocks", metadata)
    with pytest.raises(CheckpointError, match=message):
        describe(tmp_path / "model.gguf")
