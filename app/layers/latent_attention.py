"""Multi-head latent attention (MLA: DeepSeek-V2, 2024): one small vector of a token is cached for all heads.

It is the token's latent, of which every head's key and value are linear functions (`kv_b_proj`), and one rotated key
that all heads share. A query that brings few tokens goes through the keys' function the other way round and meets the
latents themselves (absorbed); for many tokens keys and values are computed (expanded): see latent_step.py. Ranks of a
tensor-parallel group split the heads; each caches the whole latent.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from app.errors import ConfigError
from app.kernels.attention import KV_FP8, KV_INT8, AttentionMetadata
from app.kernels.fused import FUSED_OPS, LatentRotation
from app.kernels.gemm import Activations
from app.kernels.mla import chunk_tokens, mla_ops
from app.layers.attention_layer import AttentionLayer, KVScaleKind
from app.layers.cache_spec import LayerCacheSpec
from app.layers.context import BuildContext, ForwardContext
from app.layers.epilogue import Epilogue, ResultT
from app.layers.latent_linear import LatentInputLinear, LatentUpLinear
from app.layers.latent_step import LatentStep, StepPart, least_expanded, split_step
from app.layers.linear import ColumnLinear, RowLinear
from app.layers.norm import RMSNorm
from app.layers.rotary import RotaryEmbedding
from app.layers.weight import ShapeMismatch

NORM_EPS = 1e-6  # of the latents' norms, whatever the model's others have


@dataclass(slots=True, frozen=True)
class LatentSettings:
    """The shape of latent attention, before it is split over ranks."""

    latent_size: int  # R
    nope_dim: int  # of a head's key, what does not rotate
    rope_dim: int
    value_dim: int
    query_rank: int | None = None  # of the queries' own latent, which is not cached; None: they have none
    scale: float = 1.0  # of the scores
    interleaved: bool = True  # the dimensions that rotate together lie in pairs
    bias: bool = False  # of the projections that read or give hidden states

    @property
    def key_dim(self) -> int:
        """A head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers that are cached of a token."""
        return self.latent_size + self.rope_dim


class LatentAttention(AttentionLayer):
    """`layer_index` picks the layer's cache among those of this pipeline stage."""

    captures_context = False  # how many chunks of them there are is the host's to say

    def __init__(
        self,
        ctx: BuildContext,
        settings: LatentSettings,
        hidden_size: int,
        num_heads: int,
        layer_index: int,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__()
        self.settings = s = settings
        self.num_heads = ctx.groups.tp.share_of(num_heads, "num_attention_heads")
        self.input_proj = LatentInputLinear(ctx, hidden_size, num_heads * s.key_dim, s.query_rank, s.width, s.bias)
        self.q_a_layernorm = self.q_b_proj = None
        if s.query_rank is not None:
            self.q_a_layernorm = RMSNorm(ctx, s.query_rank, NORM_EPS)
            self.q_b_proj = ColumnLinear(ctx, s.query_rank, num_heads * s.key_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(ctx, s.latent_size, NORM_EPS)
        self.kv_b_proj = LatentUpLinear(ctx, s.latent_size, num_heads, s.nope_dim, s.value_dim)
        self.o_proj = RowLinear(ctx, num_heads * s.value_dim, hidden_size, s.bias)
        self.layer_index, self.rotary = layer_index, rotary
        if ctx.kv_dtype == KV_INT8:
            raise ConfigError("kv_cache_dtype: latents are kept in fp8 or as they are", param="kv_cache_dtype")
        self.kv_dtype = ctx.kv_dtype or ctx.dtype
        ctx.attention_ops.require(kv_fp8=self.kv_dtype == KV_FP8)
        self.kv_scales = torch.ones(1, dtype=torch.float32, device=ctx.device) if ctx.kv_dtype else None
        self._given_scales: dict[KVScaleKind, float] = {}
        self.least_expanded = least_expanded(s.latent_size, s.nope_dim, s.value_dim)
        self.short_query = self.least_expanded - 1
        self._kind = ctx.device, ctx.dtype, ctx.max_model_len
        self._workspace: torch.Tensor | None = None
        self.ops = mla_ops(ctx.attention_ops)
        self.is_capturable = self.ops.is_capturable
        self.captures_prompts = self.is_capturable and ctx.dtype != torch.float32
        self.fused = ctx.kernels(FUSED_OPS)

    @property
    def plan_key(self) -> Hashable:
        """Layers of the same heads and sizes share a plan."""
        return self.ops, self.num_heads, self.settings

    def plan(self, meta: AttentionMetadata, block_size: int) -> None:
        """Part the step, and let the backend plan each part."""
        step = split_step(meta, self.least_expanded)
        for part in (step.absorbed, step.expanded):
            if part is not None:
                self.ops.prepare(part.meta, num_heads=self.num_heads, block_size=block_size)
        if step.expanded is not None:
            step.workspace = self.workspace()
        meta.plan = step

    def workspace(self) -> torch.Tensor:
        """Memory for expanding, taken once for all layers that share a plan; on a GPU before the KV cache is sized."""
        if self._workspace is None:
            device, dtype, max_model_len = self._kind
            width = self.settings.nope_dim + self.settings.value_dim
            tokens = chunk_tokens(self.num_heads, width, dtype.itemsize, max_model_len)
            self._workspace = torch.empty(tokens, self.num_heads, width, dtype=dtype, device=device)
        return self._workspace

    def cache_spec(self) -> LayerCacheSpec:
        """One vector a token: the normed latent, then the rotated key."""
        return LayerCacheSpec((), self.settings.width, self.kv_dtype)

    def set_kv_scales(self, kind: KVScaleKind, scales: torch.Tensor) -> None:
        """One number. Where keys and values have one each, the larger: then nothing that is cached is clamped."""
        assert self.kv_scales is not None, "the cache is not quantized"
        if len(scales) != 1:
            raise ShapeMismatch(f"has shape {list(scales.shape)}, not one number for the layer's latents")
        self._given_scales[kind] = float(scales)
        self.kv_scales.fill_(max(self._given_scales.values()))

    def reset_kv_scales(self) -> None:
        """See AttentionLayer.reset_kv_scales."""
        self._given_scales.clear()
        super().reset_kv_scales()

    def forward(self, x: Activations, epilogue: Epilogue[ResultT], ctx: ForwardContext) -> ResultT:
        """x [T, C] -> the output [T, C], and what follows it. Writes the tokens' latents into the cache."""
        query, absorbed, step = self._write(x, ctx)
        cache = ctx.kv_caches[self.layer_index]
        if step.absorbed is None:
            out = self._attend_expanded(query, cache, step)
        else:
            out = query.new_empty(*query.shape[:2], self.settings.value_dim)
            self._attend_absorbed(query, absorbed, cache, step.absorbed, out)
            if step.expanded is not None:
                out[step.expanded.tokens] = self._attend_expanded(query, cache, step)
        return self.o_proj(out.flatten(1), epilogue)  # type: ignore[no-any-return]

    def keep(self, x: Activations, ctx: ForwardContext) -> None:
        """x [T, C]: its latents go into the cache, and nothing attends to them yet."""
        self._write(x, ctx)

    def _write(self, x: Activations, ctx: ForwardContext) -> tuple[torch.Tensor, torch.Tensor | None, LatentStep]:
        """Returns x's queries [T, H, Dn + Dr], where those for latents [T, H, R + Dr] begin to be made, and the step's
        plan; the rest is in the cache then."""
        cache, meta, s = ctx.kv_caches[self.layer_index], ctx.attention[self.layer_index], self.settings
        step = meta.plan
        assert isinstance(step, LatentStep), "a layer of this key was not planned"
        query, latent = self._project(x)
        turn = self.rotary.of_step(ctx)
        if turn.query_scale is not None:
            query = query * turn.query_scale
        rotation = LatentRotation(turn.cos, turn.sin, s.interleaved, self.kv_a_layernorm.weight, NORM_EPS)
        pe = query[..., s.nope_dim :]
        absorbed = query.new_empty(*query.shape[:2], s.width) if step.expanded is None else None
        turned = pe if absorbed is None else absorbed[..., s.latent_size :]
        self.fused.rotate_and_write_latent(pe, latent, rotation, cache, meta.slot_mapping, self.kv_scales, turned)
        return query, absorbed, step

    def _project(self, x: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of this rank's heads [T, H, Dn + Dr] and the tokens' latents [T, R + Dr], as they are projected."""
        query, latent = self.input_proj(x).split(self.input_proj.sizes, dim=-1)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            query = self.q_b_proj(self.q_a_layernorm(query))
        return query.unflatten(-1, (self.num_heads, self.settings.key_dim)), latent

    def _attend_absorbed(
        self, query: torch.Tensor, absorbed: torch.Tensor | None, cache: torch.Tensor, part: StepPart, out: torch.Tensor
    ) -> None:
        """Queries [T, H, Dn + Dr] of a part's tokens, through the functions of the keys, to the latents, and through
        those of the values into `out` [T, H, Dv]. `absorbed` [T, H, R + Dr]: has their rotated part already."""
        s, heads = self.settings, self.kv_b_proj.heads
        query = part.of(query)
        if absorbed is None:
            absorbed = query.new_empty(*query.shape[:2], s.width)
            absorbed[..., s.latent_size :] = query[..., s.nope_dim :]
        self.ops.head_products(query[..., : s.nope_dim], heads[:, : s.nope_dim], absorbed[..., : s.latent_size])
        found = self.ops.attend(
            absorbed, cache, part.meta, scale=s.scale, latent_size=s.latent_size, kv_scale=self.kv_scales
        )
        values = heads[:, s.nope_dim :].transpose(1, 2)
        if isinstance(part.tokens, slice):
            self.ops.head_products(found, values, out[part.tokens])
            return
        of_part = query.new_empty(*query.shape[:2], s.value_dim)
        self.ops.head_products(found, values, of_part)
        out[part.tokens] = of_part

    def _attend_expanded(self, query: torch.Tensor, cache: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """A part's queries of [T, H, Dn + Dr] to the keys and values of their contexts: [its T, H, Dv]."""
        part = step.expanded
        assert part is not None
        return self.ops.attend_expanded(
            part.of(query), cache, part.meta, self.kv_b_proj.heads, step.workspace,
            scale=self.settings.scale, value_dim=self.settings.value_dim, kv_scale=self.kv_scales,
        )  # fmt: skip
