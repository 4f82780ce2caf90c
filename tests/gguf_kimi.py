"""What llama.cpp's converter makes of Kimi-Linear (conversion/kimi_linear.py), as the numbers that it writes and the
way back from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_NAMES = {
    **{"b_proj.weight": "ssm_beta.weight", "g_a_proj.weight": "ssm_g_a.weight", "g_b_proj.weight": "ssm_g_b.weight"},
    **{"f_a_proj.weight": "ssm_f_a.weight", "f_b_proj.weight": "ssm_f_b.weight", "o_norm.weight": "ssm_norm.weight"},
    **{"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"},
}


def kimi_tensors(
    name: str, parameter: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, Callable[[torch.Tensor], object]]]:
    """Name, numbers and way back of each tensor that a parameter of its delta attention becomes; none of any other."""
    layer, _, part = name.partition(".layers.")[2].partition(".self_attn.")
    part = part.removeprefix("forget_gate.")
    own = f"blk.{layer}.{_NAMES.get(part)}"
    if part == "A_log":
        yield own, -parameter.exp(), lambda x: parameter.copy_((-x).log())
    elif part == "conv1d.weight":
        for letter, kernel in zip("qkv", parameter.chunk(3), strict=True):
            written = kernel.view(1, len(kernel), 1, -1)
            yield f"blk.{layer}.ssm_conv1d_{letter}.weight", written, written.copy_
    elif part in _NAMES:
        yield own, parameter, parameter.copy_


def kimi_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the converter writes of both kinds of attention and of experts."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    found = {
        "attention.head_count_kv": [1 if kind == "full_attention" else 0 for kind in config["layer_types"]],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "attention.key_length": rank + rope,
        "attention.value_length": None,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_group_count": config["num_expert_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
    }
    return {f"{{arch}}.{key}": value for key, value in found.items()}
