"""Mixtral: Mistral whose feed-forward layers are experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import Rule, renamed
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, one_window

MIXTRAL_NAMES: list[Rule] = [
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
]


class MixtralForCausalLM(CausalLM):
    """Softmax over all experts, the best two, their weights made to sum to 1."""

    rope_defaults = MappingProxyType({"rope_theta": 1_000_000.0})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 8)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 2)), renormalize=True),
            layers=frozenset(range(info.num_layers)),
        )
        settings = DecoderSettings.from_info(info, norm_eps=1e-5)
        return replace(settings, sliding_windows=one_window(info), experts=experts)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names."""
        return [(renamed(name, MIXTRAL_NAMES), tensor)]
