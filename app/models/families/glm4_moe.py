"""GLM-4.5: experts chosen as DeepSeek-V3 does, half of each head turned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import is_behind_last_layer
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


class Glm4MoeForCausalLM(CausalLM):
    """GLM-4.5, 4.6 and Air; the layers that predict further tokens are left out."""

    rope_defaults = MappingProxyType({"partial_rotary_factor": 0.5})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        size = int(hf.get("moe_intermediate_size", 1408))
        rule = RoutingRule(
            top_k=int(hf.get("num_experts_per_tok", 8)),
            scoring="sigmoid",
            renormalize=bool(hf.get("norm_topk_prob", True)),
            scale=float(hf.get("routed_scaling_factor", 1.0)),
            num_groups=int(hf.get("n_group", 1)),
            groups_chosen=int(hf.get("topk_group", 1)),
            group_score="top2",
        )
        experts = ExpertSettings(
            num_experts=int(hf.get("n_routed_experts", 128)),
            intermediate_size=size,
            rule=rule,
            layers=frozenset(range(int(hf.get("first_k_dense_replace", 1)), info.num_layers)),
            rounds_logits=False,
            corrects=True,
            shared_size=size * int(hf.get("n_shared_experts", 1) or 0),
        )
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            qkv_bias=bool(hf.get("attention_bias", False)),
            qk_norm="head_rms" if hf.get("use_qk_norm") else None,
            experts=experts,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """All but what lies behind the last layer."""
        return [] if is_behind_last_layer(name, settings.num_layers) else [(name, tensor)]
