"""The decoder-only model that the Llama family shares: its variants differ by their DecoderSettings.

Module names are those of Hugging Face checkpoints, so a parameter's path is its name there (fused layers name their
parts).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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
from app.engine.models.decoder_settings import DecoderSettings


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
        self.input_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps)
        self.self_attn = Attention(ctx, attention, cache_index)
        self.post_attention_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps)
        self.mlp = GatedMLP(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, C] -> (mlp's output or parts of it, what they are still to be added to): the next norm adds them. The
        first layer of a stage has no residual yet."""
        if residual is None:
            normed, residual = self.input_layernorm(x), x
        else:
            normed, residual = self.input_layernorm.after_add(x, residual)
        attended = self.self_attn(normed, rotation, ctx)
        normed, residual = self.post_attention_layernorm.after_add(attended, residual)
        return self.mlp(normed), residual


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
        residual = None
        for layer in self.layers.values():
            x, residual = layer(x, residual, rotation, ctx)
        if residual is None:
            return x if self.norm is None else self.norm(x)
        if self.norm is None:  # the next stage takes whole hidden states
            total: torch.Tensor = (x.sum(0).to(residual.dtype) if x.dim() == 3 else x) + residual
            return total
        return self.norm.after_add(x, residual)[0]


class CausalLM(nn.Module, ABC):
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

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] of the rows that need them -> fp32 [N, V]; in the last pipeline stage."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `logits`, in the model's own type."""
        assert self.lm_head is not None, "logits are computed in the last stage"
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    @property
    def attention_layers(self) -> list[Attention]:
        """In the order of their KV caches."""
        return [module for module in self.modules() if isinstance(module, Attention)]
