"""Embeddings of tokens for each layer equal their definition; in a model they are checked with Gemma 4."""

from __future__ import annotations

import torch

from app.models.decoder_layers.per_layer_inputs import PerLayerInputs
from app.models.decoder_settings import DecoderSettings
from tests.layers.test_state_layer import context

SETTINGS = DecoderSettings(
    vocab_size=20, hidden_size=12, intermediate_size=16, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=6,
    norm_eps=1e-5, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True, sliding_windows=(None,) * 3,
)  # fmt: skip


def test_table_and_projection() -> None:
    inputs = PerLayerInputs(context(), SETTINGS, 20, 4)
    for weight in inputs.parameters():
        weight.data.normal_()
    ids, x = torch.tensor([3, 19, 3]), torch.randn(3, SETTINGS.hidden_size)
    table, projection, factor = (weight.data for weight in inputs.parameters())
    of_x = (x @ projection.t() / SETTINGS.hidden_size**0.5).view(3, SETTINGS.num_layers, 4)
    normed = of_x / (of_x.square().mean(-1, keepdim=True) + SETTINGS.norm_eps).sqrt() * factor
    expected = (normed + 2.0 * table[ids].view(3, SETTINGS.num_layers, 4)) / 2**0.5
    torch.testing.assert_close(inputs(ids, x), expected)
