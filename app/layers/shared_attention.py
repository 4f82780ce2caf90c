"""Attention that has queries of its own alone, and reads keys and values that an earlier layer caches (Gemma 3n, 4)."""

from __future__ import annotations

import torch

from app.kernels.gemm import Activations
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.layer import Layer
from app.layers.linear import ColumnLinear, RowLinear
from app.layers.norm import RMSNorm


class SharedAttention(Layer):
    """Stands where layers attend that cache nothing: `source` plans its steps, too."""

    def __init__(self, ctx: BuildContext, settings: AttentionSettings, source: Attention) -> None:
        super().__init__()
        s, width = settings, settings.num_heads * settings.head_dim
        self.q_proj = ColumnLinear(ctx, s.hidden_size, width, s.qkv_bias)
        self.o_proj = RowLinear(ctx, width, s.hidden_size, s.output_bias)
        self.q_norm = RMSNorm(ctx, s.head_dim, s.norm_eps)
        self.head_dim = s.head_dim
        self._source = (source,)  # no module of this one

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it. Behind the source's own call in a step."""
        (source,) = self._source
        projected: torch.Tensor = self.q_proj(x)
        heads = self.q_norm(projected.view(len(projected), -1, self.head_dim))
        query = source.rotary.of_step(ctx).apply(heads)
        out = source.attend(query, ctx)
        return self.o_proj(out.reshape(len(out), -1), epilogue)  # type: ignore[no-any-return]
