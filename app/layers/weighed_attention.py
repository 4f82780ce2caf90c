"""Attention whose scores get a number of the key's token (Doge: Shi et al., "Dynamic Mask Attention", 2025).

The number is cached as a further dimension of the key, which a query meets with 1 / scale: kernels know nothing of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from app.errors import UnsupportedError
from app.kernels.gemm import Activations
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import RowLinear
from app.layers.rotary import RotaryEmbedding
from app.layers.weight import REPLICATED, Weight

_FURTHER = 16  # dimensions of a cached head, of which one is used: kernels want such multiples


class WeighedAttention(Attention):
    """The number is exp(A * softplus(a projection of all heads' values)), one for each key head."""

    def __init__(
        self, ctx: BuildContext, settings: AttentionSettings, layer_index: int, rotary: RotaryEmbedding
    ) -> None:
        super().__init__(ctx, settings, layer_index, rotary)
        s, tp = settings, ctx.groups.tp
        if s.num_kv_heads % tp.size:
            raise UnsupportedError(
                f"num_key_value_heads={s.num_kv_heads} is no multiple of tensor_parallel_size={tp.size}",
                param="tensor_parallel_size",
            )
        self.dt_proj = RowLinear(ctx, s.num_kv_heads * s.head_dim, s.num_kv_heads, s.qkv_bias)
        self.A = Weight(torch.empty(s.num_kv_heads, dtype=ctx.dtype), REPLICATED)
        self.own_width, self.head_dim = s.head_dim, s.head_dim + _FURTHER

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """See Attention.forward."""
        qkv = self.qkv_proj(x)
        heads = qkv.view(len(qkv), -1, self.own_width)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        numbers = torch.exp(self.A * F.softplus(self.dt_proj(value.flatten(1))))
        numbers = numbers[:, self.first_kv_head : self.first_kv_head + self.num_kv_heads]
        wide = heads.new_zeros(*heads.shape[:2], self.head_dim)
        wide[..., : self.own_width] = torch.cat((query, key, value), 1)
        wide[:, : self.num_heads, self.own_width] = 1.0 / self.scale
        wide[:, self.num_heads : self.num_heads + self.num_kv_heads, self.own_width] = numbers
        rotation = self.rotary.of_step(ctx)
        cache, slots = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index].slot_mapping
        turned = self.fused.rotate_and_write(wide, rotation.cos, rotation.sin, None, cache, slots, self.kv_scales)
        out = self.attend(turned, ctx)[..., : self.own_width]
        return self.o_proj(out.reshape(len(out), -1), epilogue)  # type: ignore[no-any-return]
