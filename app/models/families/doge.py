"""Doge: attention with a number for each key, sums with a weight for each channel. Contexts of `keep_window_size`
tokens, beyond which a choice of keys would count."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from app.checkpoints.model_info import ModelInfo
from app.layers.context import BuildContext
from app.layers.experts.row_experts import RowExpertMLP
from app.layers.weighed_attention import WeighedAttention
from app.models.blocks import Blocks, LayerPlace, attention_settings
from app.models.decoder import CausalLM
from app.models.decoder_layers.weighed_sums import WeighedSumLayer
from app.models.decoder_settings import DecoderSettings, one_window


def _attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> WeighedAttention:
    return WeighedAttention(ctx, attention_settings(settings, place), place.cache_index, place.rotary)


def _row_experts(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace, *, info: ModelInfo) -> RowExpertMLP:
    s, hf = settings, info.hf_config
    return RowExpertMLP(
        *(ctx, s.hidden_size, s.intermediate_size, s.hidden_act, s.mlp_bias),
        num_experts=int(hf.get("num_experts", 16384)),
        top_k=int(hf.get("num_experts_per_tok", 64)),
        renormalize=bool(hf.get("norm_topk_prob", False)),
    )


class DogeForCausalLM(CausalLM):
    """One feed-forward layer, or experts beside it (`is_moe`), chosen for each token by itself.

    transformers' code gives a token the scores of others where a prompt comes in one piece, as it views both halves of
    all tokens' keys wrongly; token by token, as it generates, it is what it was meant to be.
    """

    blocks = Blocks(attention=_attention, layer=WeighedSumLayer)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """See CausalLM."""
        is_moe = bool(info.hf_config.get("is_moe"))
        return replace(cls.blocks, mlp=partial(_row_experts, info=info)) if is_moe else cls.blocks

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm="head_rms",
            sliding_windows=one_window(info),
        )
