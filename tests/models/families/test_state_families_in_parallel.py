"""Families whose layers keep states over two ranks, split by heads or by layers; CI takes one of each."""

from __future__ import annotations

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.records.parallel_plan import check_parallel_sizes
from tests.models.families.state_variants import STATE_VARIANTS
from tests.models.families.test_families_in_parallel import HEADS, LAYOUTS, check_layout
from tests.tiny_models import tiny_model

IN_CI = (("qwen3_next", "tp2"), ("qwen3_5", "pp2"))
CASES = [(name, layout) for name in STATE_VARIANTS for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_tokens_equal_transformers(name: str, layout: str) -> None:
    family, changes = STATE_VARIANTS[name]
    heads = {name: count for name, count in HEADS.items() if name not in changes.get("without", ())}
    if changes.get("hidden_size") == 72:
        heads = {**heads, "num_attention_heads": 2}  # of 36
    if "kv_lora_rank" in changes:
        heads = {**heads, "num_key_value_heads": heads["num_attention_heads"]}
    check_layout(family, {**changes, **heads}, LAYOUTS[layout], num_blocks=200)  # states lie in blocks, too


def test_stages_of_feed_forward_layers_alone_are_refused_by_name() -> None:
    family, changes = STATE_VARIANTS["nemotron_h"]
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: a stage has layers that neither attend"):
        check_layout(family, {**changes, "hybrid_override_pattern": "M*--"}, LAYOUTS["pp2"])


def test_heads_that_ranks_cannot_share_out_are_refused_by_name() -> None:
    family, changes = STATE_VARIANTS["qwen3_5"]
    directory = str(tiny_model(family, **{**changes, **HEADS, "linear_num_key_heads": 1}))
    config = EngineConfig(model=directory, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="does not divide linear_num_key_heads=1"):
        check_parallel_sizes(config, ModelInfo.from_directory(directory))
