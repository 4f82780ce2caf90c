"""Mixtures of experts through transformers' experts interface, on which its stacked experts compute without the host.

Each rank of a tensor-parallel group has a share of every expert's width; the sums over the ranks are made here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.models.transformers_backend.linears import style_of

IMPLEMENTATION = "manta"
_GROUP = "manta_tp"
_STYLE = "moe_tp_experts"


def _experts(module: Any, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """hidden states [T, C] through experts `index` [T, K], weighed by `weights` [T, K] -> [T, C]."""
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    few = hidden_states.is_cuda and hidden_states.dtype != torch.bfloat16 and index.numel() <= 4 * module.num_experts
    compute = batched_mm_experts_forward if few else grouped_mm_experts_forward
    out: torch.Tensor = compute(module, hidden_states, index, weights)
    group = getattr(module, _GROUP, None)
    return out if group is None else group.all_reduce(out)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def prepare_experts(hf: Any, ctx: BuildContext, plan: Mapping[str, str]) -> bool:
    """Have all experts computed here; whether a step with them can be captured in a CUDA graph."""
    experts = [(path, module) for path, module in hf.named_modules() if hasattr(module, "is_concatenated")]
    if not experts:
        return True
    hf.config._experts_implementation = IMPLEMENTATION
    for path, module in experts:
        if style_of(path, plan, ctx.groups.tp) == _STYLE:
            _refuse_odd(module)
            setattr(module, _GROUP, ctx.groups.tp)
    return ctx.dtype == torch.bfloat16


def _refuse_odd(module: nn.Module) -> None:
    if module.is_transposed or module.has_bias or not (module.is_concatenated or not module.has_gate):
        raise UnsupportedError("experts with biases, or stored interleaved or transposed, are not split", param="model")
