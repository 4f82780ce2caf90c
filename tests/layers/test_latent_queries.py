"""Attention to learned vectors, alone; tests/models/families/test_nv_embed.py has it behind a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.distributed.parallel_groups import ParallelGroups
from app.layers.context import BuildContext
from app.layers.epilogue import PLAIN
from app.layers.latent_queries import LatentQueries
from app.worker.attention.backend import select_attention

CPU = torch.device("cpu")


def test_tokens_attend_to_the_learned_vectors_and_are_fed() -> None:
    torch.manual_seed(0)
    ctx = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
    layer, x = LatentQueries(ctx, 12, num_latents=5, num_heads=3, head_dim=4), torch.randn(7, 12)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.3)
    with torch.inference_mode():
        query = layer.q_proj(layer.norm(x)).view(7, 3, 4)
        key, value = layer.kv_proj(layer.latent_norm(layer.latents.weight)).view(5, 2, 3, 4).unbind(1)
        shares = (torch.einsum("thd,nhd->htn", query, key) / 2).softmax(-1)
        seen = torch.einsum("htn,nhd->thd", shares, value).flatten(1)
        expected = x + F.linear(seen, layer.o_proj.weight)
        expected = expected + layer.mlp(layer.mlp_norm(expected), PLAIN)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
