"""Groups of inputs that do not lie side by side (GPTQ's `desc_act`: Frantar et al., 2022): the columns of a weight are
sorted by their groups once, and inputs are gathered in that order.

A rank of a row layer holds any number of a group's inputs. Groups are then filled up to a multiple of `SHORT` columns
that stand for 0, so that every so many have one scale.
"""

from __future__ import annotations

import torch

from app.errors import CheckpointError
from app.quantization.base import StoredModule
from app.quantization.forms import GroupForm

SHORT = 16


def is_ordered(module: StoredModule, name: str, size: int, *, must_say: bool = False) -> bool:
    """True if the index `name` says that groups are not of `size` inputs side by side; -1 throughout says that they
    are. CheckpointError where it names no group of an input, or `must_say` so and is not there."""
    index = (module.tensors or {}).get(name)
    if index is None:
        if must_say and module.tensors is not None:
            raise CheckpointError(f"the checkpoint lacks {module.name}.{name}, the order of its inputs", param="model")
        return False
    groups, count = index.whole(), -(-module.num_inputs // size)
    if groups.shape == (module.num_inputs,) and bool((groups == -1).all()):
        return False
    if groups.shape != (module.num_inputs,) or not bool(((groups >= 0) & (groups < count)).all()):
        raise CheckpointError(
            f"{module.name}.{name} names no group for each of {module.num_inputs} inputs", param="model"
        )
    return not torch.equal(groups.long(), torch.arange(len(groups)) // size)


def sorted_groups(
    codes: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    groups: torch.Tensor,
    bits: int,
    dtype: torch.dtype,
) -> GroupForm:
    """codes uint8 [N, K], scale and offset [N, G] of all groups, groups int [K]: each input's group."""
    order = torch.sort(groups, stable=True).indices
    counts = torch.bincount(groups, minlength=scale.shape[1])
    held = counts > 0
    size = int(counts.max())
    whole = bool((counts[held] == size).all())
    if whole:
        scale, offset = scale[:, held], None if offset is None else offset[:, held]
        return GroupForm(codes[:, order], scale, size, bits, dtype, offset, order)
    runs = -(-counts // SHORT)  # of each group
    source = _filled(order, counts, runs * SHORT)
    filled = codes[:, source.clamp(min=0)]
    zero = torch.full_like(scale, 1 << (bits - 1)) if offset is None else -offset / scale
    of_run = torch.arange(len(runs), device=runs.device).repeat_interleave(runs)
    zeros = zero[:, of_run].repeat_interleave(SHORT, 1).round().to(torch.uint8)
    filled = torch.where(source >= 0, filled, zeros)
    offset = None if offset is None else offset[:, of_run]
    return GroupForm(filled, scale[:, of_run], SHORT, bits, dtype, offset, source.clamp(min=0))


def _filled(order: torch.Tensor, counts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The inputs of each group, then -1 until it has its size."""
    filled = torch.full((int(sizes.sum()),), -1, dtype=torch.int64, device=order.device)
    begins, firsts = sizes.cumsum(0) - sizes, counts.cumsum(0) - counts
    group = torch.arange(len(counts), device=order.device).repeat_interleave(counts)
    places = begins[group] + torch.arange(len(order), device=order.device) - firsts[group]
    filled[places] = order
    return filled
