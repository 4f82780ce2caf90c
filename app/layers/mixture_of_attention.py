"""A mixture of attention heads (Zhang et al., 2022): each token asks with queries of a few experts. Keys and values are
the same for all of them."""

from __future__ import annotations

import torch

from app.errors import UnsupportedError
from app.kernels.gemm import Activations
from app.layers.attention import Attention, AttentionSettings
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.experts.gate import Gate
from app.layers.experts.settings import ExpertSettings
from app.layers.linear import QKVLinear, RowLinear
from app.layers.rotary import RotaryEmbedding


class MixtureOfAttention(Attention):
    """Projects the queries of all experts, and keeps those of the chosen ones. `num_heads` of the settings are heads of
    chosen experts; in the products of queries and outputs all experts' heads of one key lie together."""

    def __init__(
        self,
        ctx: BuildContext,
        settings: AttentionSettings,
        experts: ExpertSettings,
        layer_index: int,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__(ctx, settings, layer_index, rotary)
        s, self.num_experts = settings, experts.num_experts
        if s.num_kv_heads % ctx.groups.tp.size:
            raise UnsupportedError(
                f"num_key_value_heads={s.num_kv_heads} is no multiple of tensor_parallel_size={ctx.groups.tp.size}",
                param="tensor_parallel_size",
            )
        heads = s.num_kv_heads * self.num_experts
        self.qkv_proj = QKVLinear(ctx, s.hidden_size, s.head_dim, heads, s.num_kv_heads, bias=False)
        self.o_proj = RowLinear(ctx, heads * s.head_dim, s.hidden_size, bias=True)
        self.gate = Gate(ctx, s.hidden_size, experts)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """See Attention.forward."""
        routing = self.gate.choose(x, ctx)
        qkv = self.qkv_proj(x)
        num_tokens, keys, dim = len(qkv), self.num_kv_heads, self.head_dim
        every = qkv.view(num_tokens, -1, dim)
        queries = every[:, : keys * self.num_experts].view(num_tokens, keys, self.num_experts, dim)
        # Padding has no expert; while a start only compiles kernels, the gate's has written none.
        ids = routing.ids.clamp(0, self.num_experts - 1).long()
        chosen = ids[:, None, :, None].expand(-1, keys, -1, dim)
        heads = torch.cat((queries.gather(2, chosen).flatten(1, 2), every[:, keys * self.num_experts :]), 1)
        rotation = self.rotary.of_step(ctx)
        cache, slots = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index].slot_mapping
        query = self.fused.rotate_and_write(heads, rotation.cos, rotation.sin, None, cache, slots, self.kv_scales)
        weights = routing.weights[:, None, :, None].to(query.dtype)
        given = self.attend(query, ctx).view(num_tokens, keys, -1, dim) * weights
        out = torch.zeros_like(queries, memory_format=torch.contiguous_format).scatter(2, chosen, given)
        return self.o_proj(out.view(num_tokens, -1), epilogue)  # type: ignore[no-any-return]
