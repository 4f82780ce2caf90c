"""OLMoE: Llama with experts, and norms over all queries and all keys together."""

from __future__ import annotations

from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings


class OlmoeForCausalLM(CausalLM):
    """Softmax over all experts; the weights of the best ones sum to less than 1 unless config.json says otherwise."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        bias = bool(hf.get("attention_bias", False))
        rule = RoutingRule(
            top_k=int(hf.get("num_experts_per_tok", 8)), renormalize=bool(hf.get("norm_topk_prob", False))
        )
        experts = ExpertSettings(
            num_experts=int(hf.get("num_experts", 64)),
            intermediate_size=info.intermediate_size,
            rule=rule,
            layers=frozenset(range(info.num_layers)),
            rounds_weights=True,
        )
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="projection_rms",
            attention_clip=float(hf["clip_qkv"]) if "clip_qkv" in hf else None,
            experts=experts,
        )
