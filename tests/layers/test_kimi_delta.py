"""Kimi Delta Attention: what a rank holds of it; results are checked with the family."""

from __future__ import annotations

import torch

from app.layers.kimi_delta import KimiDeltaAttention, KimiDeltaSettings
from tests.layers.test_state_layer import context
from tests.layers.test_tensor_parallel_shares import Recorded


def test_a_rank_holds_its_heads_and_narrow_products_whole() -> None:
    layer = KimiDeltaAttention(context(1, 2), 32, KimiDeltaSettings(4, 8, 4, 1e-6), 0)
    shares = layer.in_proj.output_shares
    assert [(share.start, share.size) for share in shares.values()] == [(16, 16)] * 3 + [(2, 2)] + [(0, 8)] * 2
    assert [tensor.shape for tensor in layer.state_spec().tensors] == [(3, 48), (2, 8, 8)]
    biases = torch.randn(32)
    layer.dt_bias.weight_loader(Recorded(biases))
    assert torch.equal(layer.dt_bias.data, biases[16:])
