"""Layers with cross attention join their blocks as their formulas say; the families are held to transformers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from app.models.blocks import LayerPlace
from app.models.decoder_layers import cross
from tests.models.decoder_layers.test_decoder_layers import BLOCKS, WIDTH, Block, Times


def made(kind: type[Any], monkeypatch: pytest.MonkeyPatch, index: int) -> Any:
    monkeypatch.setattr(cross, "CrossAttention", lambda *_: Block())
    monkeypatch.setattr(cross, "attention_settings", lambda *_: None)
    torch.manual_seed(0)
    settings = cast("Any", type("Settings", (), {"cross_positions": 4, "residual_scale": 1.0}))
    return kind(cast("Any", None), settings, LayerPlace(index, index, cast("Any", None)), BLOCKS)


def test_norms_before_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, following, ctx = made(cross.CrossLayer, monkeypatch, 0), torch.randn(3, WIDTH), Times(), object()
    expected = x + layer.self_attn(layer.input_layernorm(x))
    expected = expected + layer.encoder_attn(layer.encoder_attn_layer_norm(expected))
    expected = expected + layer.mlp(layer.post_attention_layernorm(expected))
    normed, out = layer(layer.input_layernorm(x), x, following, ctx)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(normed, following(expected))
    assert layer.encoder_attn.ctx is ctx


@pytest.mark.parametrize("index", [0, 1])
def test_norms_of_sums(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    layer, x = made(cross.NormedSumCrossLayer, monkeypatch, index), torch.randn(3, WIDTH)
    assert (layer.input_layernorm is not None) == (index == 0)  # of the embeddings
    read = x if layer.input_layernorm is None else layer.input_layernorm(x)
    expected = layer.post_attention_layernorm(read + layer.self_attn(read))
    expected = layer.encoder_attn_layer_norm(expected + layer.encoder_attn(expected))
    expected = layer.post_feedforward_layernorm(expected + layer.mlp(expected))
    for normed in layer(read, x, None, object()):
        torch.testing.assert_close(normed, expected)
