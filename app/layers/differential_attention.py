"""Differential attention (Ye et al., 2024): heads in pairs, of which the second's weights are subtracted from the
first's, over values of both.

A pair caches four heads: either key with either value. So ordinary kernels serve it, for twice the cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from app.errors import UnsupportedError
from app.kernels.gemm import Activations
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.rotary import RotaryEmbedding
from app.layers.weight import REPLICATED, Weight


class DifferentialAttention(Attention):
    """In the products, heads of a pair lie together: the queries of its first key, those of its second; both keys; both
    values."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: AttentionSettings,
        layer_index: int,
        rotary: RotaryEmbedding,
        *,
        layer: int,
    ) -> None:
        """`layer`: its number in the model, by which the share that is subtracted begins."""
        super().__init__(ctx, settings, layer_index, rotary)
        if settings.num_kv_heads % (2 * ctx.groups.tp.size):
            raise UnsupportedError(
                f"num_key_value_heads={settings.num_kv_heads} are no pairs for each of tensor_parallel_size="
                f"{ctx.groups.tp.size} ranks",
                param="tensor_parallel_size",
            )
        self.num_pairs, self.group = self.num_kv_heads // 2, self.num_heads // self.num_kv_heads
        self.num_heads, self.num_kv_heads = 2 * self.num_heads, 2 * self.num_kv_heads
        self.first_kv_head, self.whole_kv_heads = 2 * self.first_kv_head, 2 * self.whole_kv_heads
        self.choose_cache(ctx)
        self.eps, self.begin = settings.norm_eps, 0.8 - 0.6 * math.exp(-0.3 * layer)
        for name in ("q1", "k1", "q2", "k2"):
            weight = Weight(torch.empty(settings.head_dim, dtype=ctx.dtype), REPLICATED)
            setattr(self, f"lambda_{name}", weight)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """See Attention.forward."""
        qkv = self.qkv_proj(x)
        num_tokens, pairs, group, dim = len(qkv), self.num_pairs, self.group, self.head_dim
        query, key, value = qkv.split((2 * pairs * group * dim, 2 * pairs * dim, 2 * pairs * dim), 1)
        shape = num_tokens, pairs, 2, 2, dim  # by pair, key, value
        queries = query.view(num_tokens, pairs, 2, 1, group, dim).expand(-1, -1, -1, 2, -1, -1)
        keys = key.view(num_tokens, pairs, 2, 1, dim).expand(shape)
        values = value.view(num_tokens, pairs, 1, 2, dim).expand(shape)
        heads = torch.cat([part.reshape(num_tokens, -1, dim) for part in (queries, keys, values)], 1)
        rotation = self.rotary.of_step(ctx)
        cache, slots = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index].slot_mapping
        turned = self.fused.rotate_and_write(heads, rotation.cos, rotation.sin, None, cache, slots, self.kv_scales)
        out = self.attend(turned, ctx).view(num_tokens, pairs, 2, 2, group, dim)
        wide = torch.cat((out[:, :, :, 0], out[:, :, :, 1]), -1)
        kept = wide[:, :, 0] - self._share().to(wide.dtype) * wide[:, :, 1]
        normed = F.rms_norm(kept, (2 * dim,), None, self.eps) * (1.0 - self.begin)
        return self.o_proj(normed.reshape(num_tokens, -1), epilogue)  # type: ignore[no-any-return]

    def _share(self) -> torch.Tensor:
        """Returns what the second head of a pair is multiplied by."""
        one, two = (
            (getattr(self, f"lambda_q{i}") * getattr(self, f"lambda_k{i}")).sum(dtype=torch.float32).exp()
            for i in (1, 2)
        )
        return one - two + self.begin  # type: ignore[no-any-return]
