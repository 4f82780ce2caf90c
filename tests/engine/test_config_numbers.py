"""Fields of config.json that hold something else than families read are named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.engine.config_numbers import check_numbers
from app.errors import CheckpointError
from tests.engine.models.test_deepseek import PUBLISHED

ROOT = Path(__file__).parents[2]


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
        ({"rms_norm_eps": [1]}, r"rms_norm_eps is \[1\], not a number"),
        ({"moe_num_experts": [64]}, r"moe_num_experts is \[64\], not"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1, not"),
        ({"rope_scaling": 40}, "rope_scaling is 40, not an object"),
    ],
)
def test_a_field_that_holds_something_else_is_named(wrong: dict[str, Any], message: str) -> None:
    config = PUBLISHED["DeepSeek-V3"][1]
    check_numbers(config, "config.json")
    with pytest.raises(CheckpointError, match=rf"config\.json is not usable: {message}"):
        check_numbers({**config, **wrong}, "config.json")


def test_what_families_take_for_numbers_is_checked() -> None:
    """All names but those that mean something else in another family, or below 0."""
    number = r'\b(?:int|float)\((?:hf|\w+\.hf_config)(?:\.get\(|\[)"(\w+)"'
    files = [*(ROOT / "app" / "engine" / "models").glob("*.py"), ROOT / "app" / "engine" / "model_info.py"]
    taken = {name for file in files for name in re.findall(number, file.read_text())}
    assert len(taken) > 40
    config = PUBLISHED["DeepSeek-V3"][1]
    for name in taken - {"pad_token_id", "moe_layer_end_index", "sliding_window_pattern"}:
        with pytest.raises(CheckpointError, match=f"{name} is \\[\\], not"):
            check_numbers({**config, name: []}, "config.json")
