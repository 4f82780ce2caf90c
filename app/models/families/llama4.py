"""Llama 4: experts whose weights multiply what they read, layers without positions, normed queries and keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed, text_name
from app.checkpoints.tensors.stacked_experts import DOWN, HALVES, Cuts, transposed_cuts, unstacked
from app.checkpoints.tensors.tensor_view import pairs_to_halves
from app.kernels.moe import RoutingRule
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.experts.settings import ExpertSettings
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, LayerPlace, grouped_query_attention
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import NO_ROPE, DecoderSettings, rotating_layers

_NAMES: list[Rule] = [
    (r"\.feed_forward\.router\.", ".mlp.gate."),
    (r"\.feed_forward\.shared_expert\.", ".mlp.shared_experts."),
    (r"\.feed_forward\.", ".mlp."),
]
_STACKED: dict[str, Cuts] = {"gate_up_proj": transposed_cuts(HALVES), "down_proj": transposed_cuts(DOWN)}


def attention(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
    """Layers that know no positions norm nothing."""
    turns = settings.rope_types[place.index] != NO_ROPE
    return grouped_query_attention(ctx, settings if turns else replace(settings, qk_norm=None), place)


class Llama4ForCausalLM(CausalLM):
    """Scout and Maverick."""

    blocks = Blocks(attention=attention)
    rope_defaults = MappingProxyType({"rope_theta": 500_000.0})
    swaps_expert_adapters = True

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        layers, turns = range(info.num_layers), rotating_layers(info)
        step = int(hf.get("interleave_moe_layer_step", 1))
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 16)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 1)), scoring="sigmoid"),
            layers=frozenset(hf["moe_layers"] if "moe_layers" in hf else layers[step - 1 :: step]),
            rounds_weights=True,
            weighs_input=True,
            shared_size=info.intermediate_size,
        )
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            intermediate_size=int(hf.get("intermediate_size_mlp", 16384)),
            head_dim=int(hf.get("head_dim") or 128),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head_unit_rms" if hf.get("use_qk_norm", True) else None,
            rope_types=tuple("" if one else NO_ROPE for one in turns),
            experts=experts,
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """Layers without positions scale their queries by the position instead."""
        hf = info.hf_config
        rope = super().ropes(info, settings, max_model_len)
        scales = {}
        if hf.get("attn_temperature_tuning", True):
            scales = {
                "llama_4_scaling_beta": hf.get("attn_scale", 0.1),
                "original_max_position_embeddings": hf.get("floor_scale", 8192),
                "first_position": 1,
            }
        return lambda kind: RopeSettings.none(scales) if kind == NO_ROPE else rope(kind)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Dimensions of queries and keys in our order, each expert's parts of the stacked tensors."""
        own = text_name(name)
        if own is None:
            return []
        own = renamed(own, _NAMES)
        head, _, stacked = own.rpartition(".mlp.experts.")
        if stacked in _STACKED:
            return unstacked(f"{head}.mlp.experts", "weight", tensor, _STACKED[stacked])
        if ".q_proj." in own or ".k_proj." in own:
            return [(own, pairs_to_halves(tensor, settings.head_dim, settings.head_dim))]
        return [(own, tensor)]
