"""transformers' linear layers as ours: split over ranks by the model's plan, siblings that read one input in one
product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from app.distributed.parallel_groups import RankGroup
from app.errors import UnsupportedError
from app.layers.context import BuildContext
from app.layers.linear import ColumnLinear, MergedColumnLinear, RowLinear
from app.models.transformers_backend.deferral import Site, rows_of
from app.models.transformers_backend.tracing import Trace

# Styles of plans whose layers every rank holds whole: what stands between is whole then, too.
WHOLE = (None, "colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "mla_kv_a_proj")


class Projection(ColumnLinear):
    """One product."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        super().__init__(ctx, input_size, output_size, bias)
        self.site = Site()

    def forward(self, x: Any, *_: Any) -> Any:
        """[..., K] -> [..., N], or what stands for it."""
        return over_rows(super().forward, x, sum(self.shares.values()), self.site)


class RowProjection(RowLinear):
    """One product whose input is split."""

    def __init__(self, ctx: BuildContext, input_size: int, output_size: int, bias: bool) -> None:
        super().__init__(ctx, input_size, output_size, bias)
        self.site = Site()

    def forward(self, x: Any, *_: Any) -> Any:
        """[..., K] -> [..., N], or what stands for it."""
        return over_rows(super().forward, x, self.output_size, self.site)


class Siblings(MergedColumnLinear):
    """Several products of one input. Each sibling takes its part; the first one to be called computes all."""

    def __init__(self, ctx: BuildContext, input_size: int, output_sizes: dict[str, int], bias: bool) -> None:
        super().__init__(ctx, input_size, output_sizes, bias)
        self.outputs: torch.Tensor | None = None  # what the parts are views of
        self.is_watched = False  # by a rotation, which drops the outputs
        self._source: Any = None
        self._taken = 0

    def part(self, index: int, x: Any) -> torch.Tensor:
        """Part `index` of the products of x [..., K]: [..., N of the part]."""
        sizes = list(self.shares.values())
        outputs = self.outputs
        if self._source is not x or outputs is None:
            self.outputs = outputs = over_rows(self.forward, x, sum(sizes))
            self._source, self._taken = x, 0
        self._taken += 1
        if self._taken == len(sizes):
            self._source = None
            if not self.is_watched:
                self.outputs = None
        return outputs.narrow(-1, sum(sizes[:index]), sizes[index])


class Sibling(nn.Module):
    """The place of one of them."""

    def __init__(self, siblings: Siblings, index: int) -> None:
        super().__init__()
        self._siblings, self._index = (siblings,), index  # no module of this one

    def forward(self, x: Any) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        return self._siblings[0].part(self._index, x)


def over_rows(product: Any, x: Any, size: int, site: Site | None = None) -> Any:
    """A product of rows for x [..., K]: [..., size]; of no contents for a tensor on the meta device."""
    rows, shape = rows_of(x), torch.Size((*x.shape[:-1], size))
    like = rows if isinstance(rows, torch.Tensor) else rows.rows
    if site is not None and site.tries:
        return site.result(partial(product, rows), shape, like)
    return like.new_empty(shape) if like.is_meta else product(rows).view(shape)


def exchange_linears(hf: nn.Module, trunk: nn.Module, ctx: BuildContext, trace: Trace, plan: Mapping[str, str]) -> None:
    """Put ours in the places of all linear layers of `trunk` that the trace has seen called once."""
    names = {module: name for name, module in hf.named_modules()}
    inside = set(trunk.modules())  # less those that have been exchanged with what they stood in
    calls = [(module, x) for module, x in trace.linears if module in inside]
    modules = [module for module, _ in calls]
    once = [(module, x) for module, x in calls if modules.count(module) == 1]

    def kind(call: tuple[nn.Module, torch.Tensor]) -> tuple[Any, ...]:
        module, x = call
        style = style_of(names[module], plan, ctx.groups.tp)
        return names[module].rpartition(".")[0], id(x), module.bias is not None, style

    for (parent_name, _, _, style), group in groupby(once, kind):
        members = {names[module].rpartition(".")[2]: module for module, _ in group}
        _exchange(hf.get_submodule(parent_name), members, context_of(ctx, style), style)


def _exchange(parent: nn.Module, members: Mapping[str, Any], ctx: BuildContext, style: str | None) -> None:
    first = next(iter(members.values()))
    bias = first.bias is not None
    if style == "rowwise":
        for name, module in members.items():
            parent.add_module(name, RowProjection(ctx, module.in_features, module.out_features, bias))
        return
    if len(members) == 1:
        parent.add_module(next(iter(members)), Projection(ctx, first.in_features, first.out_features, bias))
        return
    sizes = {name: module.out_features for name, module in members.items()}
    siblings = Siblings(ctx, first.in_features, sizes, bias)
    parent.add_module("_".join(members), siblings)
    for index, name in enumerate(members):
        parent.add_module(name, Sibling(siblings, index))


def style_of(name: str, plan: Mapping[str, str], tp: RankGroup) -> str | None:
    """Returns how the plan splits a module or parameter; None: it says nothing, or there is one rank."""
    if tp.size == 1:
        return None
    return next((plan[pattern] for pattern in _patterns(name) if pattern in plan), None)


def context_of(ctx: BuildContext, style: str | None) -> BuildContext:
    """The context of a linear layer of this style; UnsupportedError for one that we do not know."""
    if style in ("colwise", "rowwise"):
        return ctx
    if style not in WHOLE:
        raise UnsupportedError(f"its tensor-parallel plan splits linear layers by {style!r}", param="model")
    return replace(ctx, groups=replace(ctx.groups, tp=RankGroup()))


def _patterns(name: str) -> Iterable[str]:
    """The name, with * for numbers."""
    yield name
    yield ".".join("*" if part.isdigit() else part for part in name.split("."))
