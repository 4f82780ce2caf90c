"""GPT-OSS: attention sinks, windows on every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.names import renamed
from app.checkpoints.tensors.stacked_experts import DOWN, IN_TURN, Cuts, flattened_cuts, transposed_cuts, unstacked
from app.kernels.moe import GLU, RoutingRule
from app.layers.experts.settings import ExpertSettings
from app.models.decoder import CausalLM
from app.models.decoder_settings import DecoderSettings, layer_types, windows_of

# What the checkpoint holds beside `...mlp.experts`: our leaf, and where an expert's parts are.
_STACKED: dict[str, tuple[str, Cuts]] = {
    "gate_up_proj": ("weight", transposed_cuts(IN_TURN)),
    "gate_up_proj_bias": ("bias", IN_TURN),
    "gate_up_proj_blocks": ("weight_packed", flattened_cuts(IN_TURN)),
    "gate_up_proj_scales": ("weight_scale", IN_TURN),
    "down_proj": ("weight", transposed_cuts(DOWN)),
    "down_proj_bias": ("bias", DOWN),
    "down_proj_blocks": ("weight_packed", flattened_cuts(DOWN)),
    "down_proj_scales": ("weight_scale", DOWN),
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssForCausalLM(CausalLM):
    """gpt-oss-20b and 120b."""

    rope_defaults = MappingProxyType({"rope_theta": 150_000.0, "rope_scaling": _YARN})

    @staticmethod
    def settings(info: ModelInfo) -> DecoderSettings:
        """The settings of config.json."""
        hf = info.hf_config
        experts = ExpertSettings(
            num_experts=int(hf.get("num_local_experts", 128)),
            intermediate_size=info.intermediate_size,
            rule=RoutingRule(top_k=int(hf.get("num_experts_per_tok", 4)), scoring="softmax_of_chosen"),
            layers=frozenset(range(info.num_layers)),
            activation=GLU(limit=float(hf.get("swiglu_limit", 7.0)), alpha=1.702, up_offset=1.0),
            rounds_weights=True,
            gate_bias=True,
            bias=True,
        )
        default = ["full_attention" if i % 2 else "sliding_attention" for i in range(info.num_layers)]
        bias = bool(hf.get("attention_bias", True))
        return replace(
            DecoderSettings.from_info(info, norm_eps=1e-5),
            head_dim=int(hf.get("head_dim") or 64),
            qkv_bias=bias,
            output_bias=bias,
            attention_sinks=True,
            sliding_windows=windows_of(info, layer_types(info, default), 128),
            experts=experts,
        )

    @staticmethod
    def tensors(settings: DecoderSettings, name: str, tensor: StoredTensor) -> Iterable[tuple[str, StoredTensor]]:
        """Each expert's parts of the stacked tensors."""
        head, _, stacked = name.rpartition(".mlp.experts.")
        if stacked in _STACKED:
            leaf, cuts = _STACKED[stacked]
            return unstacked(f"{head}.mlp.experts", leaf, tensor, cuts)
        return [(renamed(name, [(r"\.mlp\.router\.", ".mlp.gate.")]), tensor)]
