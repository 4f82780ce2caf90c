"""MiniCPM 1 and 2, as they were published: Llama with scaled embeddings, sums and logits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.errors import UnsupportedError
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings
from app.models.families.mixtral import MIXTRAL_NAMES


def with_scales(
    settings: DecoderSettings, info: ModelInfo, *, embeds: float, depth: float, base: float
) -> DecoderSettings:
    """The settings with the scales of config.json, or a family's own."""
    hf = info.hf_config
    return replace(
        settings,
        embedding_scale=float(hf.get("scale_emb", embeds)),
        residual_scale=float(hf.get("scale_depth", depth)) / math.sqrt(info.num_layers),
        logit_scale=float(hf.get("dim_model_base", base)) / info.hidden_size,
    )


def _experts(info: ModelInfo) -> ExpertSettings | None:
    """Softmax over all experts, the best ones' weights made to sum to 1."""
    number = int(info.hf_config.get("num_experts") or 0)
    if not number:
        return None
    rule = RoutingRule(top_k=int(info.hf_config.get("num_experts_per_tok", 2)), renormalize=True)
    return ExpertSettings(number, info.intermediate_size, rule, layers=frozenset(range(info.num_layers)))


class MiniCPMForCausalLM(CausalLM):
    """Attention to all tokens; one feed-forward layer, or experts."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json. UnsupportedError for attention to chosen blocks."""
        if info.hf_config.get("sparse_config"):
            raise UnsupportedError("MiniCPM with sparse_config is not supported", param="model")
        bias = bool(info.hf_config.get("attention_bias", False))
        base = DecoderSettings.from_info(info, tied=True)
        settings = replace(base, qkv_bias=bias, output_bias=bias, experts=_experts(info))
        return with_scales(settings, info, embeds=1.0, depth=math.sqrt(info.num_layers), base=info.hidden_size)

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Llama's names; experts have Mixtral's."""
        return [(renamed(name, MIXTRAL_NAMES), tensor)]
