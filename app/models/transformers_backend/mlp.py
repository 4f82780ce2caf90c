"""transformers' gated feed-forward layers as ours, where their class computes the same: which is tried on random
numbers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from app.layers.activation import ACTIVATIONS
from app.layers.context import BuildContext
from app.layers.mlp import GatedMLP
from app.models.transformers_backend.deferral import Site, rows_of
from app.models.transformers_backend.linears import context_of, style_of
from app.models.transformers_backend.norms import twin_of

_NAMES = ("gate_proj", "up_proj", "down_proj")
_STYLES = {("colwise", "colwise", "rowwise"): "colwise", (None, None, None): None}


class HfMLP(GatedMLP):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, ctx: BuildContext, hidden_size: int, size: int, hidden_act: str, bias: bool) -> None:
        super().__init__(ctx, hidden_size, size, hidden_act, bias)
        self.site = Site()

    def forward(self, x: Any, *_: Any) -> Any:
        """[..., C] -> [..., C], or what stands for it."""
        rows = rows_of(x)
        like = rows if isinstance(rows, torch.Tensor) else rows.rows
        return self.site.result(partial(GatedMLP.forward, self, rows), torch.Size(x.shape), like)


def exchange_mlps(hf: nn.Module, ctx: BuildContext, plan: Mapping[str, str]) -> None:
    """Put ours in the places of those that compute the same."""
    acts: dict[type, str | None] = {}
    for path, module in list(hf.named_modules()):
        if not _is_gated(module):
            continue
        styles = tuple(style_of(f"{path}.{name}", plan, ctx.groups.tp) for name in _NAMES)
        if styles not in _STYLES:
            continue
        if type(module) not in acts:
            acts[type(module)] = _activation(module)
        act, gate = acts[type(module)], module.gate_proj
        if act is not None:
            own = HfMLP(
                context_of(ctx, _STYLES[styles]),
                gate.in_features,
                gate.out_features,
                act,
                gate.bias is not None,
            )
            parent, _, leaf = path.rpartition(".")
            hf.get_submodule(parent).add_module(leaf, own)


def _is_gated(module: nn.Module) -> bool:
    """True if it has three linear layers that fit together, and nothing else with parameters."""
    children = dict(module.named_children())
    if any(type(children.get(name)) is not nn.Linear for name in _NAMES) or list(module.parameters(recurse=False)):
        return False
    others = [child for name, child in children.items() if name not in _NAMES]
    gate, up, down = (children[name] for name in _NAMES)
    sizes = (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
    sizes = sizes and (down.out_features, down.in_features) == (gate.in_features, gate.out_features)
    same_bias = len({child.bias is None for child in (gate, up, down)}) == 1
    return bool(sizes and same_bias and not any(list(child.parameters()) for child in others))


def _activation(module: nn.Module) -> str | None:
    """The activation with which ours computes the same; None: with none."""
    with torch.device("cpu"), torch.no_grad():
        torch_state = torch.random.get_rng_state()
        torch.manual_seed(0)
        sizes = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
        own: dict[str, Any] = {name: nn.Linear(*size, dtype=torch.float32) for name, size in sizes.items()}
        x = torch.randn(5, 8, dtype=torch.float32) * 3
        torch.random.set_rng_state(torch_state)
        others = {name: child for name, child in module.named_children() if name not in _NAMES}
        twin = twin_of(module, {}, **own, **others)
        try:
            found = twin(x)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            return None
        for name, act in ACTIVATIONS.items():
            expected = own["down_proj"](act(own["gate_proj"](x)) * own["up_proj"](x))
            if isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                return name
    return None
