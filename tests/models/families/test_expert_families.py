"""Logits and greedy tokens of every family with experts equal transformers', on tiny random checkpoints.

CI takes one variant of each family; `make acceptance` takes all.
"""

from __future__ import annotations

import pytest

from tests.hf_logprobs import check_logprobs
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_families import check
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "-" in name else ()) for name in EXPERT_VARIANTS]
)
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    family, changes = EXPERT_VARIANTS[name]
    check(tiny_model(family, **changes), (3, 16, 37, 70), 128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(EXPERT_VARIANTS))
def test_on_a_gpu(name: str) -> None:
    """Prompts in chunks, and tokens from replayed CUDA graphs, through the Triton kernels."""
    family, changes = EXPERT_VARIANTS[name]
    check_logprobs(tiny_model(family, **changes), "cuda", 2e-2)
