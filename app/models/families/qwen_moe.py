"""Qwen 2 and 3 with experts: in every layer, or in every n-th."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.kernels.moe import RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, layer_types, one_window, windows_of


def expert_settings(info: ModelInfo, num_experts: int, top_k: int, size: int) -> ExpertSettings:
    """Reads what both generations say alike, with a generation's defaults for what it may leave out."""
    hf = info.hf_config
    step, without = int(hf.get("decoder_sparse_step", 1)), set(hf.get("mlp_only_layers") or ())
    layers = frozenset(i for i in range(info.num_layers) if i not in without and (i + 1) % step == 0)
    rule = RoutingRule(
        top_k=int(hf.get("num_experts_per_tok", top_k)), renormalize=bool(hf.get("norm_topk_prob", False))
    )
    return ExpertSettings(
        num_experts=int(hf.get("num_experts", hf.get("num_local_experts", num_experts))),
        intermediate_size=int(hf.get("moe_intermediate_size", size)),
        rule=rule,
        layers=layers,
        rounds_weights=True,
    )


class Qwen2MoeForCausalLM(CausalLM):
    """Every token goes through one feed-forward layer more, whose output has a gate of its own."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = replace(
            expert_settings(info, 60, 4, 1408),
            shared_size=int(hf.get("shared_expert_intermediate_size", 5632)),
            gates_shared=True,
        )
        settings = replace(DecoderSettings.from_info(info), qkv_bias=bool(hf.get("qkv_bias", True)), experts=experts)
        if not hf.get("use_sliding_window", False):
            return settings
        most = int(hf.get("max_window_layers", 28))
        default = ["full_attention" if i % 2 or i >= most else "sliding_attention" for i in range(info.num_layers)]
        return replace(settings, sliding_windows=windows_of(info, layer_types(info, default), 4096))

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Puts what tokens share under DeepSeek's name."""
        return [(renamed(name, [(r"\.shared_expert\.", ".shared_experts.")]), tensor)]


class Qwen3MoeForCausalLM(CausalLM):
    """Normalised queries and keys; the same window, if any, in every layer."""

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        bias = bool(hf.get("attention_bias", False))
        return replace(
            DecoderSettings.from_info(info),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm="head_rms",
            sliding_windows=one_window(info, 4096) if hf.get("use_sliding_window") else (None,) * info.num_layers,
            experts=expert_settings(info, 128, 8, 768),
        )
