"""The decoder-only model that the Llama family shares: its variants differ by their DecoderSettings.

Module names are those of Hugging Face checkpoints, so a parameter's path is its name there (fused layers name their
parts).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from app.engine.layers.attention import Attention, AttentionSettings
from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.mlp import GatedMLP
from app.engine.layers.norm import RMSNorm
from app.engine.layers.rope_scaling import RopeSettings
from app.engine.layers.rotary import RotaryEmbedding, Rotation
from app.engine.layers.vocab import LMHead, VocabEmbedding
from app.engine.model_info import ModelInfo
from app.engine.models.base import EngineModel
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Rows, whole


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, index: int, cache_index: int) -> None:
        super().__init__()
        s = settings
        attention = AttentionSettings(
            hidden_size=s.hidden_size,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            qkv_bias=s.qkv_bias,
            output_bias=s.output_bias,
            qk_norm_eps=s.norm_eps if s.qk_norm else None,
            sliding_window=s.sliding_windows[index],
        )
        self.input_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps, may_be_late=True)
        self.self_attn = Attention(ctx, attention, cache_index)
        self.post_attention_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps, may_be_late=True)
        self.mlp = GatedMLP(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias)

    def forward(
        self, normed: Rows, x: torch.Tensor, next_norm: RMSNorm | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Rows, torch.Tensor]:
        """(x after `input_layernorm`, x [T, C]) -> the same of the next layer, whose norm is `next_norm`: each sum is
        normed where it is made, so that one kernel can do both. No next norm in this stage: the sum twice."""
        normed, x = self.self_attn(normed, x, self.post_attention_layernorm, rotation, ctx)
        return self.mlp(normed, x, next_norm)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers, final norm: those of this pipeline stage, under the names they have in the whole model."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, rope: RopeSettings) -> None:
        super().__init__()
        s, groups = settings, ctx.groups
        own = ctx.stage_layers if ctx.stage_layers is not None else range(s.num_layers)
        # A tied head is the embedding's table, so the last stage holds it too.
        embeds = groups.is_first_stage or (groups.is_last_stage and s.tie_word_embeddings)
        self.embed_tokens = VocabEmbedding(ctx, s.vocab_size, s.hidden_size) if embeds else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(ctx, s, index, cache) for cache, index in enumerate(own)})
        self.norm = RMSNorm(ctx, s.hidden_size, s.norm_eps) if groups.is_last_stage else None
        self.rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]; a later stage goes on from `ctx.hidden`."""
        x = ctx.hidden
        if x is None:
            assert self.embed_tokens is not None, "a later stage needs the hidden states of the one before"
            x = self.embed_tokens(input_ids)
        rotation = self.rotary.at(ctx.positions)
        layers: list[Any] = list(self.layers.values())
        norms = [*(layer.input_layernorm for layer in layers), self.norm]  # the last is None in an earlier stage
        normed = x if norms[0] is None else norms[0](x)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            normed, x = layer(normed, x, next_norm, rotation, ctx)
        return whole(normed)


class CausalLM(EngineModel):
    """A language model; a family overrides `settings`."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        settings = self.settings(info)
        rope = RopeSettings.from_hf(info.hf_config, settings.head_dim, ctx.max_model_len)
        self.model = Decoder(ctx, settings, rope)
        last = ctx.groups.is_last_stage
        self.lm_head = LMHead(ctx, settings.vocab_size, settings.hidden_size) if last else None
        self.tied = settings.tie_word_embeddings
        if self.tied and self.lm_head is not None:
            assert self.model.embed_tokens is not None
            self.lm_head.tie(self.model.embed_tokens)

    @staticmethod
    @abstractmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """Read config.json the way this family means it."""

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        return self.model(input_ids, ctx)  # type: ignore[no-any-return]

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] of the rows that need them -> [N, V] in the model's type; in the last stage."""
        assert self.lm_head is not None, "logits are computed in the last stage"
        return self.lm_head(hidden)  # type: ignore[no-any-return]
