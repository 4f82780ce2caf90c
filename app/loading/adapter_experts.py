"""An adapter's two matrices for all experts of a layer's parameter (PEFT's `target_parameters`), cut into a pair for
each expert and part.

The first is [E * r, inputs], ranks of one expert behind those of another; the second [outputs, r * E], the columns of
experts in turn (its ParamWrapper). Where a family's checkpoints hold experts in one tensor themselves, what goes along
the parameter's outputs goes the same way as its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from app.checkpoints.adapters.adapter_config import PARAM
from app.checkpoints.adapters.adapter_files import LowRankEntry
from app.errors import CheckpointError
from app.layers.experts.expert_linear import ExpertLinear
from app.loading.weight_update import GivenTensor
from app.models.base import EngineModel

_MOST_EXPERTS = 1 << 12  # of a stage without any


@dataclass(slots=True, frozen=True)
class ModulePair:
    """The two matrices of one module."""

    module: str
    first: torch.Tensor  # [r, inputs]
    second: torch.Tensor  # [outputs, r]
    is_own: bool = False  # the name is ours, and the rows are a part's; else both are the checkpoint's


def expert_pairs(
    model: EngineModel, entry: LowRankEntry, first: torch.Tensor, second: torch.Tensor
) -> Iterator[ModulePair]:
    """Views of these two for each expert. CheckpointError: they are for another number of experts, or of no size that
    the family's parameter has."""
    experts, _, part = entry.module.rpartition(".")
    _check_number(entry, (layer for layer in model.modules() if isinstance(layer, ExpertLinear)))
    swaps = model.swaps_expert_adapters and not _is_for_inputs(part, model, first, second)
    num_inputs, num_outputs = (len(second), first.shape[1]) if swaps else (first.shape[1], len(second))
    cut = _outputs_of_parts(model, entry, num_inputs, num_outputs)
    names = {"gate_up_proj": ("gate_proj", "up_proj")}.get(part, (part,))  # rows of gate lie above those of up
    for number in range(entry.num_experts):
        own, rows = first[number * entry.rank : (number + 1) * entry.rank], second[:, number :: entry.num_experts]
        if swaps:
            own, rows = rows.t(), own.t()
        if cut is not None:
            for name, outputs in cut[number].items():
                yield ModulePair(name, own, rows[outputs], is_own=True)
            continue
        for name, of_part in zip(names, rows.chunk(len(names)), strict=False):  # fewer rows than parts: no layer's
            yield ModulePair(f"{experts}.{number}.{name}", own, of_part)


def _check_number(entry: LowRankEntry, layers: Iterable[ExpertLinear]) -> None:
    """Before anything is as long as there are experts."""
    known = {layer.share.num_experts for layer in layers}
    if known and entry.num_experts not in known:
        what = f"for {entry.num_experts} experts; the layer has {', '.join(map(str, sorted(known)))}"
        raise CheckpointError(f"{entry.module}: its matrices are {what}", param=PARAM)
    if entry.num_experts > _MOST_EXPERTS:
        what = f"for {entry.num_experts:,} experts, more than {_MOST_EXPERTS:,}"
        raise CheckpointError(f"{entry.module}: its matrices are {what}", param=PARAM)


def _is_for_inputs(part: str, model: EngineModel, first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if the first matrix cannot but be the inputs', as PEFT wrote it before it swapped them."""
    layers = (layer for name, layer in model.named_modules() if name.endswith(f".{part}"))
    sizes = {layer.input_share.whole for layer in layers if isinstance(layer, ExpertLinear)}
    return first.shape[1] in sizes and len(second) not in sizes


def _outputs_of_parts(
    model: EngineModel, entry: LowRankEntry, num_inputs: int, num_outputs: int
) -> list[dict[str, slice]] | None:
    """The outputs of each part of each expert, by our names; None: checkpoints hold each expert by itself. Found by
    sending a parameter of that size, whose numbers say their output, the way that a checkpoint's goes."""
    outputs = torch.arange(num_outputs)
    for tensor in (outputs[:, None].expand(-1, num_inputs), outputs.expand(num_inputs, -1)):
        given = GivenTensor.of(entry.module, tensor.expand(entry.num_experts, -1, -1), "the adapter")
        try:
            found = list(model.own_tensors(given.name, given))
        except (RuntimeError, CheckpointError):
            continue
        views = [(name.removesuffix(".weight"), view.whole()) for name, view in found]
        if not views or views[0][1].ndim == 3:
            return None
        each = len(views) // entry.num_experts
        rows = [_rows_of(view) for _, view in views[:each]]  # the same of each expert
        if each * entry.num_experts == len(views) and all(one is not None for one in rows):
            names = [name for name, _ in views]
            own = [one for one in rows if one is not None]
            return [dict(zip(names[i : i + each], own, strict=True)) for i in range(0, len(names), each)]
    raise CheckpointError(f"{entry.module}: its matrices are of no size that the layer has", param=PARAM)


def _rows_of(view: torch.Tensor) -> slice | None:
    """The outputs along a part's rows; None: they are not along its rows."""
    rows = view[:, 0].tolist() if view.ndim == 2 and view.numel() else []
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if not rows or step < 1 or rows != list(range(rows[0], rows[-1] + 1, step)):
        return None
    return slice(rows[0], rows[-1] + 1, step)
