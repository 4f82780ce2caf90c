"""Every family with experts over two ranks: a share of each expert's width, whole experts, or stages; chunked, cached,
preempted, two steps in flight.

CI takes a sample; `make acceptance` takes all.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_families_in_parallel import HEADS, LAYOUTS, check_layout

EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
CASES = [(name, layout) for name in EXPERT_VARIANTS for layout in EXPERT_LAYOUTS]
SAMPLE = [("gpt_oss", "ep2"), ("qwen2_moe", "tp2"), ("deepseek_v2", "tp2"), *random.Random(19).sample(CASES, 1)]


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def test_tokens_equal_transformers(name: str, layout: str) -> None:
    family, changes = EXPERT_VARIANTS[name]
    heads = {} if "kv_lora_rank" in changes else HEADS  # latent attention has heads of its own
    check_layout(family, {**changes, **heads}, EXPERT_LAYOUTS[layout])
