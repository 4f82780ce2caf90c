"""Every kind of family: quantized, loaded, and near what it was. The whole grid is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.quantize.models import PROMPT, distance, judge_logits, quantized, speaking_model
from tests.worker.worker_driver import Driver, all_logits

LATENT = {"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "phi3": {"pad_token_id": 0},  # fused projections
    "gemma2": {},
    "gemma3_text": {"sliding_window": 4},
    "olmo2": {},
    "cohere": {},  # pairs of rotating dimensions
    "gpt_neox": {"num_key_value_heads": 4},  # q, k and v by head
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "deepseek_v2": {
        **EXPERTS, **LATENT, "head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family(tmp_path: Path, texts: Path, family: str) -> None:
    source = speaking_model(tmp_path / "model", family, **FAMILIES[family])
    plain = judge_logits(source)
    for form in ("int8", "w4"):
        output = quantized(source, tmp_path / form, form, group_size=32 if form == "w4" else 128)
        found = all_logits(Driver(str(output), num_blocks=16), PROMPT)
        assert 0 < distance(found, plain) < (0.2 if form == "int8" else 0.9)
    if family == "gpt_neox":  # whose attention has another name
        return
    output = quantized(source, tmp_path / "kv", "fp8", kv="tensor", calibration=texts)
    driver = Driver(str(output), num_blocks=16, kv_cache_dtype="fp8")
    assert any("in 2 of 2 layers" in note for note in driver.info.notes)
    assert distance(all_logits(driver, PROMPT), plain) < 0.5
