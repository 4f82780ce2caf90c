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

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, index: int) -> None:
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
        self.self_attn = Attention(ctx, attention, index)
        self.post_attention_layernorm = RMSNorm(ctx, s.hidden_size, s.norm_eps)
        self.mlp = GatedMLP(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias)

    def forward(self, x: torch.Tensor, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, rope: RopeSettings) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(ctx, settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(ctx, settings, index) for index in range(settings.num_layers))
        self.norm = RMSNorm(ctx, settings.hidden_size, settings.norm_eps)
        self.rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        rotation = self.rotary.at(ctx.positions)
        for layer in self.layers:
            x = layer(x, rotation, ctx)
        return self.norm(x)  # type: ignore[no-any-return]


class CausalLM(nn.Module, ABC):
    """A language model; a family overrides `settings`."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        settings = self.settings(info)
        rope = RopeSettings.from_hf(info.hf_config, settings.head_dim, ctx.max_model_len)
        self.model = Decoder(ctx, settings, rope)
        self.lm_head = LMHead(ctx, settings.vocab_size, settings.hidden_size)
        self.tied = settings.tie_word_embeddings
        if self.tied:
            self.lm_head.tie(self.model.embed_tokens)

    @staticmethod
    @abstractmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """Read config.json the way this family means it."""

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]."""
        return self.model(input_ids, ctx)  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, C] of the rows that need them -> fp32 [N, V]."""
        return self.lm_head(hidden).float()  # type: ignore[no-any-return]

    @property
    def attention_layers(self) -> list[Attention]:
        """In the order of their KV caches."""
        return [module for module in self.modules() if isinstance(module, Attention)]
