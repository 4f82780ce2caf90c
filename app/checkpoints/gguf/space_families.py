"""Families with Mamba 2 as llama.cpp has them: Mamba 2 itself, Nemotron-H, Granite 4 and Bamba, Falcon-H1.

In a layer of Nemotron-H is one block, whose kind follows from counts of each layer. Its converter (conversion/mamba.py,
nemotron.py, granite.py, falcon_h1.py) multiplies Falcon-H1's multipliers into the weights, all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.checkpoints.gguf.architecture import LAYER, Architecture
from app.checkpoints.gguf.expert_families import MULTIPLIERS, ROUTED, SHARED, choosing
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.checkpoints.gguf.state_places import arranged_states, has
from app.errors import CheckpointError


@dataclass(slots=True, frozen=True)
class SpaceNames:
    """Names that a family has for the layer and, in config.json, for its shape."""

    layer: str
    heads: str
    head_dim: str
    groups: str
    state: str
    conv: str
    conv_bias: str
    bias: str

    @property
    def tensors(self) -> dict[str, str]:
        """Those of the layer's parts."""
        parts = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
        parts |= {"ssm_norm": "norm", "ssm_out": "out_proj"}
        return {name: f"{self.layer}.{part}" for name, part in parts.items()}

    @property
    def sizes(self) -> dict[str, str]:
        """Keys of the shape, which must be there."""
        return {
            self.heads: "ssm.time_step_rank",
            self.groups: "ssm.group_count",
            self.state: "ssm.state_size",
            self.conv: "ssm.conv_kernel",
        }

    def derived(self, keys: Keys, header: GgufHeader) -> dict[str, Any]:
        """The rest of the shape. CheckpointError: channels are no heads."""
        heads = keys.needed("ssm.time_step_rank")
        inner = keys.needed("ssm.inner_size")
        if inner % heads:
            raise CheckpointError(f"GGUF: ssm.inner_size is {inner}, no {heads} heads", param="model")
        return {
            self.head_dim: inner // heads,
            self.conv_bias: has(header, "ssm_conv1d.bias"),
            self.bias: has(header, "ssm_in.bias"),
        }


_BIASES = ("use_conv_bias", "use_bias")
_MAMBA2 = SpaceNames("mixer", "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel", *_BIASES)
_NEMOTRON = SpaceNames(
    *("mixer", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"), *_BIASES
)
_BAMBA = SpaceNames(
    *("mamba", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
    *("mamba_conv_bias", "mamba_proj_bias"),
)
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def _mamba2(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {**_MAMBA2.derived(keys, header), "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon")}


def _nemotron(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {
        **_NEMOTRON.derived(keys, header),
        "hybrid_override_pattern": _pattern(keys, "-"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "mlp_bias": has(header, "ffn_up.bias"),
    }


def _nemotron_experts(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {
        **_nemotron(keys, header),
        **choosing(keys),
        "hybrid_override_pattern": _pattern(keys, "E"),
        "moe_latent_size": keys.size("moe_latent_size"),
    }


def _pattern(keys: Keys, wide: str) -> str:
    """A mark for each layer: those with heads of keys attend, those with a width are what `wide` says."""
    heads, widths = keys.of_layers("attention.head_count_kv"), keys.of_layers("feed_forward_length")
    both = [index for index, head in enumerate(heads) if head and widths[index]]
    if both:
        raise CheckpointError(f"GGUF: layer {both[0]} both attends and feeds forward", param="model")
    return "".join("*" if head else wide if width else "M" for head, width in zip(heads, widths, strict=True))


def _granite(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    """Bamba's files have this name, too, without scales and experts."""
    width, scale = keys.size("expert_shared_feed_forward_length"), keys.number("attention.scale")
    width = keys.size("feed_forward_length") if width is None and not keys.size("expert_count") else width
    heads = keys.needed("attention.head_count")
    own = keys.size("attention.key_length") or keys.needed("embedding_length") // heads
    return {
        **_BAMBA.derived(keys, header),
        "layer_types": ["attention" if head else "mamba" for head in keys.of_layers("attention.head_count_kv")],
        "num_local_experts": keys.size("expert_count") or 0,
        "num_experts_per_tok": keys.size("expert_used_count") or 0,
        "shared_intermediate_size": width or 0,
        "attention_multiplier": max(own, 1) ** -0.5 if scale is None else scale,
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned") else "nope",
    }


def _falcon_h1(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    return {
        **_BAMBA.derived(keys, header),
        "mamba_rms_norm": has(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": has(header, "ffn_up.bias"),
    }


_BARE_NORM = {"ffn_norm": "post_attention_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
_WIDTH = {"mamba_d_ssm": "ssm.inner_size"}
_RELU2 = {"mlp_hidden_act": "relu2"}
SPACE_FAMILIES = {
    "mamba2": Architecture(
        *("mamba2", "Mamba2ForCausalLM", {"attn_norm": "input_layernorm"} | _MAMBA2.tensors),
        sizes=_MAMBA2.sizes | {"intermediate_size": "ssm.inner_size"}, derived=_mamba2, attends=False,
        arranged=arranged_states,
    ),
    "nemotron_h": Architecture(
        *("nemotron_h", "NemotronHForCausalLM", _BLOCK | _NEMOTRON.tensors, _RELU2),
        sizes=_NEMOTRON.sizes, derived=_nemotron, zeros_are_none=True, arranged=arranged_states,
    ),
    "nemotron_h_moe": Architecture(
        *("nemotron_h", "NemotronHForCausalLM", _BLOCK | _EXPERTS | _NEMOTRON.tensors, _RELU2),
        sizes=_NEMOTRON.sizes
        | ROUTED
        | {"moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        derived=_nemotron_experts, zeros_are_none=True, arranged=arranged_states,
    ),
    "granitehybrid": Architecture(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM", SHARED | _BAMBA.tensors),
        sizes=_BAMBA.sizes | _WIDTH, numbers=MULTIPLIERS, derived=_granite, pairs=True, zeros_are_none=True,
        arranged=arranged_states,
    ),
    "falcon-h1": Architecture(
        *("falcon_h1", "FalconH1ForCausalLM", LAYER | _BARE_NORM | _BAMBA.tensors),
        sizes=_BAMBA.sizes | _WIDTH, derived=_falcon_h1, arranged=arranged_states,
    ),
}  # fmt: skip
