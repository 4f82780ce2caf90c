"""Layers that adapters change: what they multiply by, and how long its rows are, in whatever form it lies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.layers.adapted_layer import AdaptedLayer
from tests.tiny_models import hf_model, tiny_model
from tests.worker.worker_driver import Driver

NAMES = {
    "model.layers.0.self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "model.layers.0.mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "model.layers.0.mlp.down_proj": ("mlp.down_proj",),
}


@pytest.mark.parametrize("quantized", [False, True])
def test_products_and_squares_are_the_weights(quantized: bool) -> None:
    model = tiny_model("qwen2")
    options: dict[str, Any] = {"quantization": "fp8"} if quantized else {}
    worker = Driver(str(model), num_blocks=8, **options).worker
    assert worker._parts is not None
    modules = dict(worker._parts.model.named_modules())
    judge = hf_model(model).state_dict()
    for name, parts in NAMES.items():
        whole = torch.cat([judge[f"model.layers.0.{part}.weight"] for part in parts])
        check(modules[name], whole, 0.1 if quantized else 1e-5)
    table, head = judge["model.embed_tokens.weight"], judge["lm_head.weight"]
    check(modules["model.embed_tokens"], table.t(), 1e-5)
    check(modules["lm_head"], head, 0.1 if quantized else 1e-5)


def check(layer: Any, weight: torch.Tensor, tolerance: float) -> None:
    assert isinstance(layer, AdaptedLayer)
    with torch.inference_mode():
        x = torch.randn(3, weight.shape[1])
        expected = x @ weight.t()
        found = layer.multiply(x)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < tolerance * expected.abs().max()
        each = weight.square().sum(1)
        assert (layer.squares() - each).abs().max() < tolerance * each.max()
        by_products = AdaptedLayer.squares(layer)
        assert (by_products - each).abs().max() < tolerance * each.max()
