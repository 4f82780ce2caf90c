"""Attention over an earlier layer's cache: what a rank holds of it; results are checked with Gemma 4."""

from __future__ import annotations

import torch

from app.layers.attention import Attention, AttentionSettings
from app.layers.attention_layer import AttentionLayer
from app.layers.rope_scaling import RopeSettings
from app.layers.rotary import RotaryEmbedding
from app.layers.shared_attention import SharedAttention
from tests.layers.test_state_layer import context

SETTINGS = AttentionSettings(
    hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=False, output_bias=False, norm_eps=1e-6
)


def test_it_holds_queries_alone_and_caches_nothing() -> None:
    ctx = context(1, 2)
    rotary = RotaryEmbedding(RopeSettings.none(), 64, torch.float32, torch.device("cpu"))
    source = Attention(ctx, SETTINGS, 3, rotary)
    shared = SharedAttention(ctx, SETTINGS, source)
    assert {name: tuple(weight.shape) for name, weight in shared.named_parameters()} == {
        "q_proj.weight": (16, 32),
        "o_proj.weight": (32, 16),
        "q_norm.weight": (8,),
    }
    assert not any(isinstance(module, AttentionLayer) for module in shared.modules()), "no cache of its own"
