"""GLM-4: norms before and after the blocks (the first ones before only), half of each head turned, in pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.tensor_view import pairs_to_halves
from app.models.blocks import Blocks
from app.models.decoder import CausalLM
from app.models.decoder_layers.sandwich import SandwichLayer
from app.models.decoder_settings import DecoderSettings
from app.models.families.phi3 import split_gate_up

_NAMES = [
    (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
    (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
]


class GlmForCausalLM(CausalLM):
    """GLM-4 of 2024 (`glm-4-9b-hf`); GLM-Edge."""

    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.5})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; a head is 128 wide where it does not say."""
        settings = replace(
            DecoderSettings.from_info(info, norm_eps=1.5625e-7),
            head_dim=int(info.hf_config.get("head_dim") or 128),
            qkv_bias=bool(info.hf_config.get("attention_bias", True)),
        )
        return replace(settings, rotary_dim=GlmForCausalLM.ropes(info, settings, 1)("").dim)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Dimensions of queries and keys in our order, gate and up apart."""
        if ".q_proj." in name or ".k_proj." in name:
            return [(name, pairs_to_halves(tensor, settings.head_dim, settings.rotary_dim))]
        return split_gate_up(settings, name, tensor)


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 and later, with four norms a layer."""

    blocks = Blocks(layer=SandwichLayer)

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        bias = bool(info.hf_config.get("attention_bias", False))
        return replace(GlmForCausalLM.settings(info), qkv_bias=bias)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The same, and the norms' names."""
        return GlmForCausalLM.tensors(settings, renamed(name, _NAMES), tensor)
