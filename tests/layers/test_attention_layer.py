"""What a layer that caches keys and values says of its cache and its plan."""

from __future__ import annotations

import torch

from app.kernels.attention.reference import OPS
from app.layers.attention_layer import KVAttentionLayer
from app.worker.attention.kv_cache import describe_scales


def layer(num_kv_heads: int, scales: torch.Tensor | None = None) -> KVAttentionLayer:
    class Layer(KVAttentionLayer):
        pass

    made = Layer()
    made.ops, made.num_heads, made.num_kv_heads, made.head_dim = OPS, 4, num_kv_heads, 8
    made.sliding_window, made.kv_dtype, made.kv_scales = 6, torch.float16, scales
    return made


def test_a_block_holds_keys_and_values_of_its_heads() -> None:
    spec = layer(2).cache_spec()
    assert spec is not None
    assert spec.block_shape(16) == (2, 2, 16, 8)
    assert (spec.bytes_per_token, spec.sliding_window) == (2 * 2 * 8 * 2, 6)


def test_layers_of_the_same_heads_share_a_plan() -> None:
    assert layer(2).plan_key == layer(2).plan_key != layer(1).plan_key


def test_scales_of_any_such_layer_are_told() -> None:
    assert describe_scales([layer(1), layer(1)]) == []
    assert describe_scales([layer(1, torch.ones(2, 1))]) == ["KV cache scales: 1 (the checkpoint brings no others)"]
    told = describe_scales([layer(1, torch.full((2, 1), 0.5)), layer(1, torch.ones(2, 1))])
    assert told == ["KV cache scales: from the checkpoint, in 1 of 2 layers"]
