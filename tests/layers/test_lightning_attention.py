"""Lightning attention: the rates of its heads, and what a rank holds of them; results are checked family by family."""

from __future__ import annotations

import pytest
import torch
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from app.layers.lightning_attention import LightningAttention, LightningSettings
from tests.layers.test_state_layer import context

SETTINGS = LightningSettings(num_heads=8, head_dim=4, hidden_act="silu")


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_rates_equal_those_of_transformers(layer: int) -> None:
    config = MiniMaxConfig(num_hidden_layers=5, num_attention_heads=8, head_dim=4, hidden_size=32)
    judge = MiniMaxLightningAttention(config, layer)
    torch.testing.assert_close(SETTINGS.rates(layer, 5), judge.get_slope_rate().flatten())


def test_a_rank_holds_its_heads() -> None:
    rates = SETTINGS.rates(1, 5)
    layer = LightningAttention(context(1, 2), 32, SETTINGS, rates, 0)
    assert torch.equal(layer.log_rates, rates[4:].log())
    assert [tensor.shape for tensor in layer.state_spec().tensors] == [(4, 4, 4)]
    assert layer.norm.channels.start == 16
