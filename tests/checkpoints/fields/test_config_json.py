"""Fields of config.json that hold something else than families read are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.fields.config_json import FIELDS, check_config
from app.checkpoints.fields.kinds import FLAG
from app.errors import CheckpointError
from tests.models.families.test_deepseek import PUBLISHED

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, not a whole number from 1 to 16,384"),
        ({"n_routed_experts": 2**31 - 1}, "n_routed_experts is 2147483647, not a whole number from 0 to 65,536"),
        ({"n_routed_experts": []}, r"n_routed_experts is \[\], not"),
        ({"n_shared_experts": -1}, "n_shared_experts is -1, not"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000.*, not"),
        ({"kv_lora_rank": -1}, "kv_lora_rank is -1, not"),
        ({"v_head_dim": float("inf")}, "v_head_dim is inf, not"),
        ({"vocab_size": "129280"}, "vocab_size is '129280', not"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0, not"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, not"),
        ({"rms_norm_eps": [1]}, r"rms_norm_eps is \[1\], not a number"),
        ({"moe_num_experts": [64]}, r"moe_num_experts is \[64\], not"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1, not"),
        ({"rope_scaling": 40}, "rope_scaling is 40, not an object"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, not a number above 0 up to 1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not"),
        ({"rms_norm_eps": True}, "rms_norm_eps is True, not"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000000.*, not"),
        ({"rope_theta": 0}, "rope_theta is 0, not"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0, not"),
        ({"rope_theta": 1e308}, r"rope_theta is 1e\+308, not"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta is 0, not"),
        ({"rope_parameters": {"factor": 0}}, "rope_parameters.factor is 0, not"),
        ({"rope_parameters": {"factor": "2"}}, "rope_parameters.factor is '2', not"),
        ({"rope_scaling": {"partial_rotary_factor": 3.0}}, "rope_scaling.partial_rotary_factor is 3.0, not"),
        ({"rope_scaling": {"long_factor": [1.0, -1]}}, "rope_scaling.long_factor is "),
        ({"rope_scaling": {"truncate": "no"}}, "rope_scaling.truncate is 'no', not true or false"),
        ({"rope_parameters": {"full_attention": {"factor": 0}}}, "rope_parameters.full_attention.factor is 0, not"),
        ({"sliding_window": -1}, "sliding_window is -1, not a whole number from 0"),
        ({"sliding_window": 9.5}, "sliding_window is 9.5, not"),
        ({"sliding_window": True}, "sliding_window is True, not"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({"attention_bias": "false"}, "attention_bias is 'false', not true or false"),
        ({"attention_bias": 1}, "attention_bias is 1, not true or false"),
        ({"layer_types": {"a": 1}}, "layer_types is {'a': 1}, not a list"),
        ({"num_labels": 1 << 31}, "num_labels is 2147483648, not"),
    ],
)
def test_a_field_that_holds_something_else_is_named(wrong: dict[str, Any], message: str) -> None:
    config = PUBLISHED["DeepSeek-V3"][1]
    check_config(config, "config.json")
    with pytest.raises(CheckpointError, match=rf"config\.json is not usable: {message}"):
        check_config({**config, **wrong}, "config.json")


def test_what_families_take_for_numbers_is_checked() -> None:
    """All names but those that may be a text in another family."""
    for name in _taken_as("int|float", most=40) - {"sliding_window_pattern"}:
        with pytest.raises(CheckpointError, match=f"{name} is \\[\\], not"):
            check_config({**PUBLISHED["DeepSeek-V3"][1], name: []}, "config.json")


def test_what_families_take_for_flags_is_checked() -> None:
    assert {FIELDS[name] for name in _taken_as("bool", most=10)} == {FLAG}


def _taken_as(types: str, most: int) -> set[str]:
    """Names of config.json that code turns into one of these types; there are more than `most`."""
    pattern = rf'\b(?:{types})\((?:hf|\w+\.hf_config)(?:\.get\(|\[)"(\w+)"'
    models = ROOT / "app" / "models"
    files = [*models.glob("*.py"), *(models / "families").glob("*.py"), ROOT / "app" / "checkpoints" / "model_info.py"]
    taken = {name for file in files for name in re.findall(pattern, file.read_text())}
    assert len(taken) > most
    return taken


@pytest.mark.parametrize(
    "published",
    [
        {"sliding_window": None, "max_window_layers": 70, "use_sliding_window": False},
        {"attn_temperature_tuning": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3]},
        {"sliding_window_pattern": "LLLG"},
        {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "pad_token_id": -1},
        {"rope_scaling": {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 32}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {}}},
        {"eos_token_id": "</s>"},  # none of these fields
    ],
)
def test_what_models_are_published_with_is_taken(published: dict[str, Any]) -> None:
    check_config({**PUBLISHED["DeepSeek-V3"][1], **published}, "config.json")
