"""Kimi-Linear: three layers of Kimi Delta Attention to one of latent attention without positions; experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.layers.attention_layer import AttentionLayer
from app.layers.context import BuildContext
from app.layers.kimi_delta import KimiDeltaAttention, KimiDeltaSettings
from app.layers.rope_scaling import RopeSettings
from app.models.blocks import Blocks, LayerPlace
from app.models.decoder import Ropes
from app.models.decoder_settings import NO_ROPE, DecoderSettings
from app.models.families.deepseek import layers_with_experts, sigmoid_experts
from app.models.families.mixtral import MIXTRAL_NAMES
from app.models.latent import LatentCausalLM, latent_attention
from app.models.mixers import FULL, LINEAR, MOST_NUMBERS, ByKind, kinds_of

_NAMES: list[Rule] = [*MIXTRAL_NAMES, (r"\.forget_gate\.", ".")]
# Names of config.json as it was published, and DeepSeek's.
_OTHER_NAMES = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts_per_tok": ("num_experts_per_token",),
    "n_shared_experts": ("num_shared_experts",),
    "norm_topk_prob": ("moe_renormalize",),
    "n_group": ("num_expert_group",),
}
_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEFAULTS: dict[str, Any] = {
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "norm_topk_prob": True},
    **{"routed_scaling_factor": 2.446, "moe_intermediate_size": 1024, "first_k_dense_replace": 1},
}


def _with_known_names(info: ModelInfo) -> ModelInfo:
    hf = info.hf_config
    found = {own: next((hf[name] for name in names if name in hf), None) for own, names in _OTHER_NAMES.items()}
    known = {own: value for own, value in found.items() if value is not None}
    return replace(info, hf_config={**_SIZES, **known, **hf})


def _of_linear(info: ModelInfo) -> Mapping[str, Any]:
    """Reads `linear_attn_config`, or what transformers writes instead of it."""
    hf = info.hf_config
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    found = {name: hf[other] for name, other in names.items() if hf.get(other) is not None}
    return {**found, **(hf.get("linear_attn_config") or {})}


def _delta(info: ModelInfo) -> KimiDeltaSettings:
    linear, hf = _of_linear(info), info.hf_config
    head_dim = int(linear.get("head_dim", 128))
    if head_dim > MOST_NUMBERS:
        raise UnsupportedError(f"head_dim={head_dim} of linear_attn_config is more than {MOST_NUMBERS}", param="model")
    if str(hf.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {hf['hidden_act']!r}: convolutions know silu alone", param="model")
    num_heads, width = int(linear.get("num_heads", 32)), int(linear.get("short_conv_kernel_size", 4))
    return KimiDeltaSettings(num_heads, head_dim, width, float(hf.get("rms_norm_eps", 1e-5)))


def _kinds(info: ModelInfo) -> tuple[str, ...]:
    attends = _of_linear(info).get("full_attn_layers")  # counted from 1
    places = {int(place) - 1 for place in attends} if attends else set(range(4, info.num_layers, 4))
    return kinds_of(info, [FULL if i in places else LINEAR for i in range(info.num_layers)])


class KimiLinearForCausalLM(LatentCausalLM):
    """Experts are chosen as in DeepSeek-V3."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        info = _with_known_names(info)
        hf = info.hf_config
        if hf.get("mla_use_nope") is False or hf.get("moe_router_activation_func", "sigmoid") != "sigmoid":
            raise UnsupportedError(
                "Kimi-Linear is known with mla_use_nope and moe_router_activation_func sigmoid only", param="model"
            )
        _delta(info), _kinds(info)
        settings, experts = LatentCausalLM.settings(info), sigmoid_experts(info, _DEFAULTS)
        sparse = layers_with_experts(info)
        if experts is not None and sparse is not None:
            experts = replace(experts, layers=sparse)
        assert settings.latent is not None
        return replace(
            settings,
            latent=replace(settings.latent, interleaved=False),
            experts=experts,
            rope_types=(NO_ROPE,) * info.num_layers,
        )

    @classmethod
    def blocks_of(cls, info: ModelInfo) -> Blocks:
        """Each layer's own."""
        delta = _delta(info)

        def mixer(ctx: BuildContext, settings: DecoderSettings, place: LayerPlace) -> AttentionLayer:
            return KimiDeltaAttention(ctx, settings.hidden_size, delta, place.cache_index)

        return Blocks(attention=ByKind(_kinds(info), {LINEAR: mixer, FULL: latent_attention}))

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """No rotation, of as many dimensions as would rotate."""
        return lambda _: RopeSettings(dim=settings.head_dim, theta=1.0, rope_type="none")

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Mixtral's names."""
        for own, one in LatentCausalLM.tensors(settings, renamed(name, _NAMES), tensor):
            is_by_head = own.endswith(".A_log")
            yield own, one.reshaped(max(one.shape)) if is_by_head and one.shape else one
