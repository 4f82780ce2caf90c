"""BART (Lewis et al., 2019) and its kin: a text is read by an encoder, and an answer written by a decoder that attends
to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.kernels.attention.encoder import EncoderPlan
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.replicated import ReplicatedTable
from app.layers.sinusoidal import SinusoidalPositions
from app.models.blocks import Blocks, layer_norm, plain_mlp
from app.models.decoder_layers.cross import CrossLayer, NormedSumCrossLayer
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.encoder_decoder import OWN, EncoderDecoder, InputEncoder, encoder_info
from app.models.multimodal.sound_layers import EPS, TOWER, SoundSettings
from app.models.multimodal.text_encoder import TextEncoder
from app.models.multimodal.vision_layers import PlainBlock, Span, VisionAttention, VisionBlock

_SHARED = ("model.shared.weight", "shared.weight")
_NAMES: list[Rule] = [
    (r"^(?:model\.)?decoder\.", "model."),
    (r"^model\.layernorm_embedding\.", "model.embed_norm."),
    (r"^model\.layer_norm\.", "model.norm."),
    (r"^final_logits_bias$", "lm_head.bias"),
    (r"\.(self_attn|encoder_attn)\.out_proj\.", r".\1.o_proj."),
    (r"\.fc1\.", ".mlp.up_proj."),
    (r"\.fc2\.", ".mlp.down_proj."),
]
_NORMED_SUMS: list[Rule] = [
    (r"\.self_attn_layer_norm\.", ".post_attention_layernorm."),
    (r"\.final_layer_norm\.", ".post_feedforward_layernorm."),
]
_NORMED_INPUTS: list[Rule] = [
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
]
_COMPUTED = "embed_positions."


@dataclass(slots=True, frozen=True)
class BartKind:
    """Says in what a family differs from the others."""

    norms_sums: bool  # False: what blocks read, and the last layer's output
    norms_embeddings: bool
    head_bias: bool = True
    offset: int = 0  # the row of position 0
    learns_positions: bool = True  # False: they are sines and cosines
    reaches_last: bool = True  # see SinusoidalPositions

    def positions(self, ctx: BuildContext, info: ModelInfo, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The table of `count` positions."""
        rows = count + self.offset
        if self.learns_positions:
            return ReplicatedTable(ctx, rows, info.hidden_size)
        empty = int(info.hf_config.get("pad_token_id", 1)) if self.offset else -1
        return SinusoidalPositions(rows, info.hidden_size, empty, ctx.dtype, ctx.device, reaches_last=self.reaches_last)


class NormedSumBlock(Layer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, ctx: BuildContext, s: SoundSettings) -> None:
        super().__init__()
        self.attn = VisionAttention(ctx, s.size, s.num_heads)
        self.norm1, self.norm2 = (LayerNorm(ctx, s.size, EPS) for _ in range(2))
        self.mlp = PlainBlock(ctx, s.size, s.inner, s.act)

    def forward(self, x: torch.Tensor, span: Span) -> torch.Tensor:
        """[T, C] -> [T, C]."""
        x = self.norm1(x + self.attn(x, span))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


def normed_input_block(ctx: BuildContext, s: SoundSettings) -> VisionBlock:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    norms = LayerNorm(ctx, s.size, EPS), LayerNorm(ctx, s.size, EPS)
    return VisionBlock(norms, VisionAttention(ctx, s.size, s.num_heads), PlainBlock(ctx, s.size, s.inner, s.act))


class BartEncoder(TextEncoder):
    """The encoder of a kind."""

    rules = TOWER

    def __init__(self, ctx: BuildContext, info: ModelInfo, kind: BartKind) -> None:
        super().__init__(ctx, info)
        hf = {**info.hf_config, "scale_embedding": False}
        s = SoundSettings.of(hf, f"{info.directory}/config.json")
        self.embed_positions: Any = kind.positions(ctx, info, self.info.num_positions)
        self.layernorm_embedding = LayerNorm(ctx, s.size, EPS) if kind.norms_embeddings else None
        block = NormedSumBlock if kind.norms_sums else normed_input_block
        self.layers = nn.ModuleDict({str(index): block(ctx, s) for index in range(s.num_layers)})
        self.layer_norm = None if kind.norms_sums else LayerNorm(ctx, s.size, EPS)
        self.scale, self.offset = embedding_scale(info), kind.offset

    def encoded(self, ids: torch.Tensor, places: torch.Tensor, plan: EncoderPlan) -> torch.Tensor:
        """See TextEncoder."""
        x, span = self.embed_tokens(ids) * self.scale + self.embed_positions(places + self.offset), Span(plan)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        for layer in self.layers.values():
            x = layer(x, span)
        return x if self.layer_norm is None else self.layer_norm(x)  # type: ignore[no-any-return]


class BartForConditionalGeneration(EncoderDecoder):
    """Learned positions from row 2 on, norms of sums, biases everywhere; both halves share a table of tokens."""

    kind: ClassVar = BartKind(norms_sums=True, norms_embeddings=True, offset=2)

    @classmethod
    def settings(cls, info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        kind = cls.kind
        return replace(
            DecoderSettings.from_info(info, tied=True, hidden_act="gelu", norm_eps=EPS),
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rope_types=(NO_ROPE,) * info.num_layers,
            num_positions=info.max_position_embeddings + kind.offset,
            position_offset=kind.offset,
            embedding_scale=embedding_scale(info),
            head_bias=kind.head_bias,
            norms_embeddings=kind.norms_embeddings,
            norms_sums=kind.norms_sums,
            final_norm=not kind.norms_sums,
            cross_positions=encoder_info(info).num_positions,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """The layer of the kind, and its positions."""
        layer = NormedSumCrossLayer if cls.kind.norms_sums else CrossLayer
        positions = partial(_decoder_positions, kind=cls.kind, info=info)
        return Blocks(norm=layer_norm, mlp=plain_mlp, layer=layer, positions=positions)

    @classmethod
    def encoder_of(cls, ctx: BuildContext, info: ModelInfo) -> InputEncoder:
        """See EncoderDecoder."""
        return BartEncoder(ctx, info, cls.kind)

    def own_tensors(self, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """See EngineModel.own_tensors: the shared table is both halves'."""
        if name in _SHARED:
            return [("model.embed_tokens.weight", tensor), (f"{OWN}embed_tokens.weight", tensor)]
        if name.endswith((".embed_tokens.weight", "lm_head.weight")):  # the same once more
            return []
        if _COMPUTED in name and not self.kind.learns_positions:
            return []
        return super().own_tensors(name, tensor)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """BART's names as ours."""
        own = renamed(name, [*_NAMES, *(_NORMED_SUMS if settings.norms_sums else _NORMED_INPUTS)])
        return [(own, tensor.reshaped(settings.vocab_size) if own == "lm_head.bias" else tensor)]


def _decoder_positions(
    ctx: BuildContext, settings: DecoderSettings, kind: BartKind, info: ModelInfo
) -> Callable[[torch.Tensor], torch.Tensor]:
    return kind.positions(ctx, info, info.max_position_embeddings)


def embedding_scale(info: ModelInfo) -> float:
    """The number that embeddings are multiplied by."""
    return sqrt(info.hidden_size) if info.hf_config.get("scale_embedding") else 1.0
