"""ERNIE 4.5: Llama with heads that turn in pairs; with experts, chosen by their share and a correction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import torch

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.tensor_view import computed, pairs_to_halves
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings

_CORRECTION = ".moe_statics.e_score_correction_bias"


class Ernie4_5ForCausalLM(CausalLM):
    """The dense ones: a head is 128 wide where config.json does not say."""

    rope_defaults = MappingProxyType({"rope_theta": 500_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json; `use_bias` is that of all products but the head's."""
        bias = bool(info.hf_config.get("use_bias", False))
        return replace(
            DecoderSettings.from_info(info, tied=True, norm_eps=1e-5),
            head_dim=int(info.hf_config.get("head_dim") or 128),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bias,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Dimensions of queries and keys in our order."""
        if ".q_proj." in name or ".k_proj." in name:
            return [(name, pairs_to_halves(tensor, settings.head_dim, settings.head_dim))]
        return [(name, tensor)]


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """21B-A3B and 300B-A47B; what predicts further tokens is left out."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for products with biases."""
        if info.hf_config.get("use_bias", False):
            raise UnsupportedError("use_bias=true of config.json, beside experts", param="model")
        settings = DecoderSettings.from_info(info, tied=True, norm_eps=1e-5)
        return replace(settings, experts=expert_settings(info))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """The gate's correction [1, E] is one for each expert."""
        if name.startswith("model.mtp_"):
            return []
        if name.endswith(_CORRECTION):
            own = name.removesuffix(_CORRECTION).removesuffix(".gate") + ".gate.e_score_correction_bias"
            return [(own, computed(tensor, torch.flatten))]
        return Ernie4_5ForCausalLM.tensors(settings, name, tensor)


def expert_settings(info: ModelInfo) -> ExpertSettings:
    """Reads what config.json says of experts: in every n-th layer of some, with what all tokens share beside them."""
    hf, size = info.hf_config, int(info.hf_config.get("moe_intermediate_size", 1536))
    first, last = int(hf.get("moe_layer_start_index", 1)), int(hf.get("moe_layer_end_index", -1))
    every, stop = int(hf.get("moe_layer_interval", 1)), info.num_layers if last == -1 else last + 1
    rule = RoutingRule(top_k=int(hf.get("moe_k", hf.get("num_experts_per_tok", 6))), renormalize=True)
    return ExpertSettings(
        num_experts=int(hf.get("moe_num_experts", hf.get("num_experts", 64))),
        intermediate_size=size,
        rule=rule,
        layers=frozenset(i for i in range(first, min(stop, info.num_layers)) if (i + 1) % every == 0),
        gate_dtype=torch.float32,
        rounds_logits=False,
        rounds_weights=True,
        corrects=True,
        shared_size=size * int(hf.get("moe_num_shared_experts", 2) or 0),
    )
