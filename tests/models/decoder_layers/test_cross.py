"""Layers with cross attention join their blocks as their formulas say; the families are held to transformers."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from app.models.blocks import LayerPlace
from app.models.decoder_layers import cross
from tests.models.decoder_layers.test_decoder_layers import BLOCKS, WIDTH, Block, Times


def made(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(cross, "CrossAttention", lambda *_: Block())
    monkeypatch.setattr(cross, "attention_settings", lambda *_: None)
    torch.manual_seed(0)
    settings = cast("Any", type("Settings", (), {"cross_positions": 4, "residual_scale": 1.0}))
    return kind(cast("Any", None), settings, LayerPlace(0, 0, cast("Any", None)), BLOCKS)


def test_norms_before_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, following, ctx = made(cross.CrossLayer, monkeypatch), torch.randn(3, WIDTH), Times(), object()
    expected = x + layer.self_attn(layer.input_layernorm(x))
    expected = expected + layer.encoder_attn(layer.encoder_attn_layer_norm(expected))
    expected = expected + layer.mlp(layer.post_attention_layernorm(expected))
    normed, out = layer(layer.input_layernorm(x), x, following, ctx)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(normed, following(expected))
    assert layer.encoder_attn.ctx is ctx


def test_norms_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, read = made(cross.NormedSumCrossLayer, monkeypatch), torch.randn(3, WIDTH)
    assert layer.input_layernorm is None
    expected = layer.post_attention_layernorm(read + layer.self_attn(read))
    expected = layer.encoder_attn_layer_norm(expected + layer.encoder_attn(expected))
    expected = layer.post_feedforward_layernorm(expected + layer.mlp(expected))
    for normed in layer(read, read, None, object()):
        torch.testing.assert_close(normed, expected)
