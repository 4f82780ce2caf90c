"""Tokens' hidden states attend to vectors that the model has learned (NV-Embed: Lee et al., 2024), and go through a
feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.layers.context import BuildContext
from app.layers.epilogue import PLAIN
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from app.layers.mlp import GatedMLP
from app.layers.replicated import ReplicatedTable

_EPS = 1e-5
_WIDENED = 4  # the feed-forward layer


class LatentQueries(Layer):
    """x + attention(norm(x), norm(latents)), then x + mlp(norm(x))."""

    def __init__(self, ctx: BuildContext, size: int, num_latents: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        tp, width = ctx.groups.tp, num_heads * head_dim
        self.num_heads, self.head_dim = tp.share_of(num_heads, "num_cross_heads"), head_dim
        self.latents = ReplicatedTable(ctx, num_latents, size)
        self.norm, self.latent_norm, self.mlp_norm = (LayerNorm(ctx, size, _EPS) for _ in range(3))
        self.q_proj = ColumnLinear(ctx, size, width, bias=False)
        self.kv_proj = MergedColumnLinear(ctx, size, {"k_proj": width, "v_proj": width}, bias=False)
        self.o_proj = RowLinear(ctx, width, size, bias=False)
        self.mlp = GatedMLP(ctx, size, _WIDENED * size, "gelu", bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        query = self._heads(self.q_proj(self.norm(x)))
        key, value = (self._heads(part) for part in self.kv_proj(self.latent_norm(self.latents.weight)).chunk(2, -1))
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.o_proj(attended[0].transpose(0, 1).flatten(1), PLAIN)
        return x + self.mlp(self.mlp_norm(x), PLAIN)  # type: ignore[no-any-return]

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, len(x), self.num_heads, self.head_dim).transpose(1, 2)
