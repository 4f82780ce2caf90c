"""Self-attention over the paged KV cache: projection; norms, rotation and KV write in one; attention; projection.

Several query heads may share a KV head (grouped-query attention: Ainslie et al., 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from app.kernels.attention import AttentionOptions, HeadBias, HeadNorm
from app.kernels.fused import FUSED_OPS
from app.kernels.gemm import Activations
from app.layers.attention_layer import KVAttentionLayer
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.linear import QKVLinear, RowLinear
from app.layers.norm import RMSNorm
from app.layers.query_key_norm import QUERY_KEY_NORMS, HeadShare, QueryKeyNorm, TurnedRMSNorm
from app.layers.rotary import RotaryEmbedding, Rotation
from app.layers.weight import CheckpointTensor, Weight, WeightSpec, expect_shape

_MOST_SHARED = 256  # of a head's dimensions, which kernels hold beside those of other requests


@dataclass(slots=True, frozen=True)
class AttentionSettings:
    """The shape of one layer's attention, before it is split over ranks."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    norm_eps: float
    qk_norm: QueryKeyNorm | None = None
    scale: float | None = None  # of the scores; None: D^-0.5
    soft_cap: float | None = None
    sliding_window: int | None = None  # tokens seen, the token itself included; None: all
    alibi_slopes: tuple[float, ...] = ()  # one for each head; (): no ALiBi
    sinks: bool = False  # whether heads have one
    input_size: int | None = None  # of what is projected; None: the hidden size
    norms_values: bool = False  # each head's, by a norm without weights
    clip: float | None = None  # queries, keys and values stay within, once they are normed whole
    gates_output: bool = False  # each number that heads give, by the sigmoid of one of a further projection


class Attention(KVAttentionLayer):
    """Grouped-query attention; `layer_index` picks its KV cache among those of this pipeline stage."""

    def __init__(
        self, ctx: BuildContext, settings: AttentionSettings, layer_index: int, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        s = settings
        width = s.input_size or s.hidden_size
        self.qkv_proj = QKVLinear(ctx, width, s.head_dim, s.num_heads, s.num_kv_heads, s.qkv_bias, s.gates_output)
        self.o_proj = RowLinear(ctx, s.num_heads * s.head_dim, s.hidden_size, s.output_bias)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.first_kv_head, self.whole_kv_heads = self.qkv_proj.first_kv_head, s.num_kv_heads
        self.q_norm = self.k_norm = None
        if s.qk_norm is not None:
            make, tp = QUERY_KEY_NORMS[s.qk_norm], ctx.groups.tp
            self.q_norm = make(ctx, HeadShare(tp, s.num_heads, self.num_heads), s.head_dim, s.norm_eps)
            self.k_norm = make(ctx, HeadShare(tp, s.num_kv_heads, self.num_kv_heads), s.head_dim, s.norm_eps)
        self.head_dim, self.scale = s.head_dim, s.head_dim**-0.5 if s.scale is None else s.scale
        self.sliding_window, self.soft_cap = s.sliding_window, s.soft_cap
        self.layer_index, self.clip, self.gates_output = layer_index, s.clip, s.gates_output
        self.rotary, self.value_eps = rotary, s.norm_eps if s.norms_values else None
        self.choose_cache(
            ctx,
            sliding_window=s.sliding_window is not None,
            soft_cap=s.soft_cap is not None,
            alibi=bool(s.alibi_slopes),
            sinks=s.sinks,
        )
        self.first_head, self.whole_heads = ctx.groups.tp.rank * self.num_heads, s.num_heads
        slopes = s.alibi_slopes[self.first_head : self.first_head + self.num_heads]
        self.slopes = torch.tensor(slopes, dtype=torch.float32, device=ctx.device) if slopes else None
        self.sinks = (
            Weight(torch.empty(self.num_heads, dtype=torch.float32), WeightSpec(self.load_sinks)) if s.sinks else None
        )
        self.is_capturable = self.captures_prompts = self.ops.is_capturable
        self.shares_prefixes = self.ops.shares_prefixes and s.head_dim <= _MOST_SHARED
        self.fused = ctx.kernels(FUSED_OPS)

    def load_sinks(self, weight: Weight, tensor: CheckpointTensor, shard_id: str) -> None:
        """Load those of this rank's heads."""
        expect_shape(tensor, self.whole_heads)
        tensor.read_into(weight.data, 0, self.first_head)

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it. Writes the tokens' keys and values into the cache."""
        heads, norm, gate = self._projected(x)
        out = self._attend_at_once(heads, norm, ctx)
        if out is None:
            out = self.attend(self._write_heads(heads, norm, ctx), ctx)
        if self.gates_output:
            out = self.fused.times_sigmoid(out.reshape(len(out), -1), gate.reshape(len(out), -1))
        return self.o_proj(out.reshape(out.shape[0], -1), epilogue)  # type: ignore[no-any-return]

    def keep(self, x: Activations, ctx: ForwardContext) -> None:
        """x [T, C]: its keys and values go into the cache, and nothing attends to them yet."""
        heads, norm, _ = self._projected(x)
        self._write_heads(heads, norm, ctx)

    def _attend_at_once(self, heads: torch.Tensor, norm: HeadNorm | None, ctx: ForwardContext) -> torch.Tensor | None:
        """The output of attention [T, Hq, D] where the backend has a kernel that also rotates and writes."""
        rotation = self.rotary.of_step(ctx)
        if rotation.query_scale is not None or (norm is None and self.q_norm is not None):
            return None
        options = AttentionOptions(self.scale, self.sliding_window, self.soft_cap, self.kv_scales, **self._bias())
        cache, meta = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index]
        return self.ops.at_once(heads, rotation.cos, rotation.sin, norm, cache, meta, options)

    def _write_heads(self, heads: torch.Tensor, norm: HeadNorm | None, ctx: ForwardContext) -> torch.Tensor:
        """Returns the queries [T, Hq, D] as they attend; keys and values are in the cache then."""
        rotation, scales = self.rotary.of_step(ctx), self.kv_scales
        cache, slots = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index].slot_mapping
        query = self.fused.rotate_and_write(heads, rotation.cos, rotation.sin, norm, cache, slots, scales)
        return self._scaled(query, rotation)

    def _projected(self, x: Activations) -> tuple[torch.Tensor, HeadNorm | None, torch.Tensor]:
        """x's queries, keys and values [T, Hq + 2 Hkv, D], not yet rotated; what they are normed with then, if it is
        not done; and what gates the output."""
        qkv = self.project(x)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        num_cached = self.num_heads + 2 * self.num_kv_heads
        heads, gate = heads[:, :num_cached], heads[:, num_cached:]
        norm = self._head_norm(heads)  # OLMoE clips what is normed
        if self.clip is not None:
            heads.clamp_(-self.clip, self.clip)
        if self.value_eps is not None:
            values = heads[:, self.num_heads + self.num_kv_heads :]
            values.copy_(F.rms_norm(values, (self.head_dim,), None, self.value_eps))
        return heads, norm, gate

    def _scaled(self, query: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotated queries, times what remains."""
        if rotation.query_scale is not None:
            query = query * rotation.query_scale
        if isinstance(self.q_norm, TurnedRMSNorm) and isinstance(self.k_norm, TurnedRMSNorm):
            query = query * (self.q_norm.turned.weight * self.k_norm.turned.weight)
        return query

    def project(self, x: Activations) -> torch.Tensor:
        """x [T, C] -> queries, keys and values of this rank's heads, side by side."""
        return self.qkv_proj(x)  # type: ignore[no-any-return]

    def attend(self, query: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """query [T, Hq, D] over the cache -> [T, Hq, D]."""
        out: torch.Tensor = self.ops.paged_attention(
            query,
            ctx.kv_caches[self.layer_index],
            ctx.attention[self.layer_index],
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            kv_scales=self.kv_scales,
            **self._bias(),
        )
        return out

    def _bias(self) -> dict[str, HeadBias]:
        """Returns what the backend is given only where there is something to give."""
        if self.sinks is None and self.slopes is None:
            return {}
        return {"bias": HeadBias(self.sinks, self.slopes)}

    def _head_norm(self, heads: torch.Tensor) -> HeadNorm | None:
        """Returns what the rotating kernel shall norm with; None where `heads` [T, Hq + 2 Hkv, D] need no norm or
        have it."""
        if self.q_norm is None or self.k_norm is None:
            return None
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        query, key = heads[:, : self.num_heads], heads[:, self.num_heads :][:, : self.num_kv_heads]
        query.copy_(self.q_norm(query))
        key.copy_(self.k_norm(key))
        return None
