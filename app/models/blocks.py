"""The blocks that a decoder's layers are made of: a family takes these, or puts its own in their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from app.errors import UnsupportedError
from app.layers.attention import Attention, AttentionSettings
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.encoder_attention import EncoderAttention
from app.layers.experts.expert_mlp import ExpertMLP
from app.layers.layer_norm import LayerNorm
from app.layers.mlp import GatedMLP
from app.layers.norm import Norm, RMSNorm
from app.layers.offset_norm import OffsetRMSNorm
from app.layers.one_pass_attention import OnePassAttention
from app.layers.picture_attention import PictureAttention
from app.layers.plain_mlp import PlainMLP
from app.layers.replicated import ReplicatedTable
from app.layers.rotary import RotaryEmbedding
from app.models.decoder_settings import DecoderSettings


@dataclass(slots=True, frozen=True)
class LayerPlace:
    """The place of a layer in the model."""

    index: int  # in the whole model
    cache_index: int  # among the attention layers of this pipeline stage
    rotary: RotaryEmbedding


def rms_norm(ctx: BuildContext, settings: DecoderSettings, before_linear: bool) -> Norm:
    """An RMS norm; `before_linear`: only linear layers read it."""
    return RMSNorm(ctx, settings.hidden_size, settings.norm_eps, may_defer=before_linear)


def attention_settings(settings: DecoderSettings, place: LayerPlace) -> AttentionSettings:
    """Returns what attention of the layer at a place is made from."""
    s = settings
    return AttentionSettings(
        hidden_size=s.hidden_size,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        qkv_bias=s.qkv_bias,
        output_bias=s.output_bias,
        norm_eps=s.norm_eps,
        qk_norm=s.qk_norm,
        scale=s.attention_scale,
        soft_cap=s.attention_soft_cap,
        sliding_window=s.sliding_windows[place.index],
        alibi_slopes=s.alibi_slopes,
        sinks=s.attention_sinks,
        clip=s.attention_clip,
        gates_output=s.attention_gates,
        norms_values=s.norms_values,
    )


def grouped_query_attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
    """Rotary self-attention over cached keys and values."""
    return Attention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


def picture_attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
    """Attention both ways within pictures."""
    if settings.attention_soft_cap is not None:
        raise UnsupportedError("attention both ways within pictures with a soft cap", param="model")
    return PictureAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


def both_ways_attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
    """The same without a cache: a token sees the whole text, or a window on both sides."""
    return EncoderAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


def one_pass_attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
    """Rotary self-attention without a cache: a prompt's tokens come in one step, and look back."""
    return OnePassAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


def gated_mlp(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> nn.Module:
    """Experts in the layers that have them, in the others one feed-forward layer with a gate."""
    s = settings
    if s.experts is not None and place.index in s.experts.layers:
        return ExpertMLP(ctx, s.hidden_size, s.hidden_act, s.experts)
    return GatedMLP(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias)


def layer_norm(ctx: BuildContext, settings: DecoderSettings, before_linear: bool) -> Norm:
    """A layer norm with weight and bias."""
    return LayerNorm(ctx, settings.hidden_size, settings.norm_eps)


def unbiased_layer_norm(ctx: BuildContext, settings: DecoderSettings, before_linear: bool) -> Norm:
    """A layer norm without bias."""
    return LayerNorm(ctx, settings.hidden_size, settings.norm_eps, bias=False)


def offset_rms_norm(ctx: BuildContext, settings: DecoderSettings, before_linear: bool) -> Norm:
    """Gemma's norm."""
    return OffsetRMSNorm(ctx, settings.hidden_size, settings.norm_eps, may_defer=before_linear)


def plain_mlp(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> nn.Module:
    """A feed-forward layer without a gate."""
    return PlainMLP(ctx, settings.hidden_size, settings.intermediate_size, settings.hidden_act, settings.mlp_bias)


def learned_positions(ctx: BuildContext, settings: DecoderSettings) -> ReplicatedTable:
    """A table in the checkpoint."""
    return ReplicatedTable(ctx, settings.num_positions, settings.hidden_size)


@dataclass(slots=True, frozen=True)
class Blocks:
    """Says how each block is made. Modules keep these contracts (normed x may come as a DeferredNorm, which linear
    layers read):

    - attention: (normed x [T, C], epilogue, ForwardContext) -> what the epilogue makes of the output;
    - mlp, plain, gated or of experts: the same arguments -> the same;
    - positions: rows int64 [T] of its table -> what is added to the tokens' embeddings [T, C];
    - layer_inputs, whose `key` says where layers find in ForwardContext.memo what it makes of a step's token ids [T]
      and their embeddings [T, C];
    - layer: as DecoderLayer, with its first norm under `input_layernorm` (None: it reads x as it is).
    """

    norm: Callable[[BuildContext, DecoderSettings, bool], Norm] = rms_norm
    attention: Callable[[BuildContext, DecoderSettings, LayerPlace], AttentionLayer] = grouped_query_attention
    mlp: Callable[[BuildContext, DecoderSettings, LayerPlace], nn.Module] = gated_mlp
    layer: Callable[[BuildContext, DecoderSettings, LayerPlace, Any], nn.Module] | None = None  # None: PreNormLayer
    positions: Callable[[BuildContext, DecoderSettings], Callable[[torch.Tensor], torch.Tensor]] = learned_positions
    layer_inputs: Callable[[BuildContext, DecoderSettings], nn.Module] | None = None  # None: layers read x alone
