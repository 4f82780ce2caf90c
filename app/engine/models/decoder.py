"""The decoder-only model that the Llama family shares: its variants differ by their DecoderSettings and Blocks.

Module names are those of Hugging Face checkpoints, so a parameter's path is its name there (fused layers name their
parts).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from app.engine.layers.context import BuildContext, ForwardContext
from app.engine.layers.epilogue import AddNorm
from app.engine.layers.layer import Layer
from app.engine.layers.norm import Norm
from app.engine.layers.rope_scaling import RopeSettings
from app.engine.layers.rotary import RotaryEmbedding
from app.engine.layers.vocab import LMHead, VocabEmbedding
from app.engine.model_info import ModelInfo
from app.engine.models.base import EngineModel
from app.engine.models.blocks import Blocks, LayerPlace
from app.engine.models.decoder_settings import DecoderSettings
from app.kernels.gemm import Activations, materialize


class DecoderLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, blocks: Blocks) -> None:
        super().__init__()
        self.input_layernorm = blocks.norm(ctx, settings, True)
        self.self_attn = blocks.attention(ctx, settings, place)
        self.post_attention_layernorm = blocks.norm(ctx, settings, True)
        self.mlp = blocks.mlp(ctx, settings, place)

    def forward(
        self, normed: Activations, x: torch.Tensor, next_norm: Norm | None, ctx: ForwardContext
    ) -> tuple[Activations, torch.Tensor]:
        """(x after `input_layernorm`, x [T, C]) -> the same of the next layer, whose norm is `next_norm`: each sum is
        normed where it is made, so that one kernel can do both. No next norm in this stage: the sum twice."""
        normed, x = self.self_attn(normed, AddNorm(x, self.post_attention_layernorm), ctx)
        return self.mlp(normed, AddNorm(x, next_norm))  # type: ignore[no-any-return]


class Decoder(Layer):
    """Embedding, layers, final norm: those of this pipeline stage, under the names they have in the whole model."""

    def __init__(self, ctx: BuildContext, settings: DecoderSettings, rope: RopeSettings, blocks: Blocks) -> None:
        super().__init__()
        s, groups = settings, ctx.groups
        own = ctx.stage_layers if ctx.stage_layers is not None else range(s.num_layers)
        # A tied head is the embedding's table, so the last stage holds it too.
        embeds = groups.is_first_stage or (groups.is_last_stage and s.tie_word_embeddings)
        self.embed_tokens = VocabEmbedding(ctx, s.vocab_size, s.hidden_size) if embeds else None
        self.rotary = RotaryEmbedding(rope, ctx.max_model_len, ctx.dtype, ctx.device)
        layer = blocks.layer or DecoderLayer
        self.layers = nn.ModuleDict(
            {str(i): layer(ctx, s, LayerPlace(i, cache, self.rotary), blocks) for cache, i in enumerate(own)}
        )
        self.norm = blocks.norm(ctx, s, False) if groups.is_last_stage else None

    def forward(self, input_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """int [T] -> hidden states [T, C]; a later stage goes on from `ctx.hidden`."""
        x = ctx.hidden
        if x is None:
            assert self.embed_tokens is not None, "a later stage needs the hidden states of the one before"
            x = self.embed_tokens(input_ids)
        self.rotary.of_step(ctx)  # for all layers
        layers: list[Any] = list(self.layers.values())
        norms = [*[layer.input_layernorm for layer in layers], self.norm]  # the last is None in an earlier stage
        normed = x if norms[0] is None else norms[0](x)
        for layer, next_norm in zip(layers, norms[1:], strict=True):
            normed, x = layer(normed, x, next_norm, ctx)
        return materialize(normed)


class CausalLM(EngineModel):
    """A language model; a family overrides `settings`, and `blocks` where its layers are made of others."""

    blocks: ClassVar[Blocks] = Blocks()

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        settings = self.settings(info)
        rope = RopeSettings.from_hf(info.hf_config, settings.head_dim, ctx.max_model_len)
        self.model = Decoder(ctx, settings, rope, self.blocks)
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
