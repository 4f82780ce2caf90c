"""ALiBi's slopes are those that transformers builds for BLOOM and Falcon."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from app.models.alibi import alibi_slopes


@pytest.mark.parametrize("num_heads", [1, 8, 12, 71])
def test_slopes(num_heads: int) -> None:
    biases = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)  # [heads, 1, 2]: slope times position
    assert torch.allclose(torch.tensor(alibi_slopes(num_heads)), biases[:, 0, 1])
