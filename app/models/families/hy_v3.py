"""Hunyuan 3: Qwen 3's attention, experts chosen as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import is_behind_last_layer, renamed
from app.errors import UnsupportedError
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.deepseek import layers_with_experts, sigmoid_experts

_DEFAULTS = {
    **{"n_routed_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1},
    **{"routed_scaling_factor": 2.826, "norm_topk_prob": True, "first_k_dense_replace": 1},
}
_OWN = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}
_NAMES = [
    (r"\.mlp\.(?:expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
]


class HYV3ForCausalLM(CausalLM):
    """The first layer is dense where config.json names no kinds; what predicts further tokens is left out."""

    rope_defaults = MappingProxyType({"rope_theta": 11_158_840.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; a head is 128 wide where it does not say."""
        hf = {_OWN.get(name, name): value for name, value in info.hf_config.items()}
        experts = sigmoid_experts(replace(info, hf_config=hf), _DEFAULTS)
        if experts is None:
            raise UnsupportedError("num_experts=0: this family has layers with experts", param="model")
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            head_dim=int(hf.get("head_dim") or 128),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm="head_rms",
            experts=replace(experts, layers=layers_with_experts(info) or experts.layers),
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The published names, and those of transformers."""
        return [] if is_behind_last_layer(name, settings.num_layers) else [(renamed(name, _NAMES), tensor)]
