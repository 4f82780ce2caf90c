"""Kimi-Linear as llama.cpp has it: layers with a count of 0 heads of keys have Kimi Delta Attention, the others latent
attention (conversion/kimi_linear.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.checkpoints.gguf.architecture import Architecture
from app.checkpoints.gguf.expert_families import LATENT, ROUTED, choosing, latent_sizes
from app.checkpoints.gguf.header import GgufHeader
from app.checkpoints.gguf.keys import Keys
from app.checkpoints.gguf.state_places import arranged_states

_DELTA = {
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}


def _derived(keys: Keys, header: GgufHeader) -> Mapping[str, Any]:
    renormalizes = keys.flag("expert_weights_norm")
    heads = keys.of_layers("attention.head_count_kv")
    return {
        **latent_sizes(keys),
        **choosing(keys),
        "norm_topk_prob": True if renormalizes is None else renormalizes,
        "linear_attn_config": {
            "full_attn_layers": [index for index, count in enumerate(heads, 1) if count],
            "head_dim": keys.needed("kda.head_dim"),
            "num_heads": keys.needed("attention.head_count"),
            "short_conv_kernel_size": keys.needed("ssm.conv_kernel"),
        },
    }


KIMI_LINEAR = Architecture(
    *("kimi_linear", "KimiLinearForCausalLM", LATENT | _DELTA),
    sizes=ROUTED, derived=_derived, zeros_are_none=True, arranged=arranged_states,
)  # fmt: skip
