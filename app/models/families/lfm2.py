"""LFM2: gated short convolutions, and attention in some layers; with experts from some layer on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.checkpoints.tensors.stacked_experts import stacked_parts
from app.checkpoints.tensors.tensor_view import split_rows
from app.kernels.moe import RoutingRule
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.experts.settings import ExpertSettings
from app.layers.gated_short_conv import PARTS, GatedShortConv
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.mixers import FULL, ByKind, kinds_of

_CONV = "conv"
_NAMES: list[Rule] = [
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"(layers\.\d+)\.conv\.", r"\1.self_attn."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
]


class Lfm2ForCausalLM(CausalLM):
    """Normed queries and keys; the norm behind the last layer is called the embedding's."""

    rope_defaults = MappingProxyType({"rope_theta": 1_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        settings = _settings(info)
        if not hf.get("block_auto_adjust_ff_dim", True):
            return settings
        size, of = int(2 * settings.intermediate_size / 3), int(hf.get("block_multiple_of", 256))
        if (factor := hf.get("block_ffn_dim_multiplier", 1.0)) is not None:
            size = -(-int(float(factor) * size) // of) * of
        return replace(settings, intermediate_size=size)

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        hf = info.hf_config
        width, bias = int(hf.get("conv_L_cache", 3)), bool(hf.get("conv_bias", False))

        def conv(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            return GatedShortConv(ctx, settings.hidden_size, width, bias, place.cache_index)

        return Blocks(attention=ByKind(_kinds(info), {_CONV: conv, FULL: grouped_query_attention}))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; the convolution's three projections, and experts that are stored in one tensor, apart."""
        name = renamed(name, _NAMES)
        if (parts := stacked_parts(name, tensor)) is not None:
            return parts
        head, found, leaf = name.rpartition(".in_proj.")
        if not found:
            return [(name, tensor)]
        sizes = dict.fromkeys(PARTS, settings.hidden_size)
        return [(f"{head}.{part}.{leaf}", one) for part, one in split_rows(tensor, sizes)]


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """The first layers have one feed-forward layer; experts are chosen by sigmoids, with a correction or without."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        rule = RoutingRule(
            top_k=int(hf.get("num_experts_per_tok", 4)),
            scoring="sigmoid",
            renormalize=bool(hf.get("norm_topk_prob", True)),
            scale=float(hf.get("routed_scaling_factor", 1.0)),
        )
        experts = ExpertSettings(
            num_experts=int(hf.get("num_experts", 32)),
            intermediate_size=int(hf.get("moe_intermediate_size", 1792)),
            rule=rule,
            layers=frozenset(range(int(hf.get("num_dense_layers", 2)), info.num_layers)),
            corrects=bool(hf.get("use_expert_bias", True)),
        )
        return replace(_settings(info), experts=experts)


def _kinds(info: ModelInfo) -> tuple[str, ...]:
    attends = info.hf_config.get("full_attn_idxs")
    indices = range(info.num_layers) if attends is None else set(attends)
    default = [FULL if i in indices else _CONV for i in range(info.num_layers)]
    return kinds_of(info, default, (_CONV, FULL))


def _settings(info: ModelInfo) -> DecoderSettings:
    hf = info.hf_config
    _kinds(info)
    return replace(
        DecoderSettings.from_info(info),
        intermediate_size=int(hf.get("block_ff_dim") or info.intermediate_size),
        norm_eps=float(hf.get("norm_eps", 1e-5)),
        tie_word_embeddings=bool(hf.get("tie_embedding", hf.get("tie_word_embeddings", True))),
        qk_norm="head_rms",
    )
