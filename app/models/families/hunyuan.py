"""Hunyuan: Llama whose queries and keys are normed once rotated; with experts beside a layer for all tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.layers.rope_scaling import number_of
from app.models.decoder import CausalLM, Ropes
from app.models.decoder_settings import DecoderSettings

_NAMES: list[Rule] = [
    (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm.turned."),
    (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm.turned."),
    (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
]


class HunYuanDenseV1ForCausalLM(CausalLM):
    """The dense ones."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError where layers share keys and values."""
        hf = info.hf_config
        if hf.get("use_cla", False):
            raise UnsupportedError("use_cla=true of config.json: layers that share keys and values", param="model")
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            head_dim=int(hf.get("head_dim") or hf.get("attention_head_dim") or info.head_dim),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="turned_head_rms" if hf.get("use_qk_norm", True) else None,
        )

    @classmethod
    def ropes(cls, info: ModelInfo, settings: DecoderSettings, max_model_len: int) -> Ropes:
        """A context that `alpha` stretches is a larger base, the same at any length (NTK-aware scaling)."""
        hf = info.hf_config
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
            base, dim = rope.get("rope_theta", hf.get("rope_theta", 10000.0)), settings.head_dim
            stretch = number_of("alpha", rope["alpha"]) ** (dim / (dim - 2))
            stretched = {"rope_theta": number_of("rope_theta", base) * stretch}
            info = replace(info, hf_config={**hf, "rope_parameters": stretched})
        return super().ropes(info, settings, max_model_len)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names."""
        return [(renamed(name, _NAMES), tensor)]


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """A13B: softmax over all experts, the best ones' weights made to sum to 1."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_experts", 1)),
            intermediate_size=int(hf.get("moe_intermediate_size", info.intermediate_size)),
            rule=RoutingRule(int(hf.get("moe_topk", 1)), renormalize=True),
            layers=frozenset(range(info.num_layers)),
            rounds_logits=False,
            gate_dtype=torch.float32,
            shared_size=info.intermediate_size * int(hf.get("num_shared_expert", 1)),
        )
        return replace(HunYuanDenseV1ForCausalLM.settings(info), experts=experts)
