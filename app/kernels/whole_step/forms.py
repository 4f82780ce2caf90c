"""Forms of weights that a whole step multiplies by; in Gluon they are in `gluon_forms`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from app.kernels.whole_step import StepWeight


@dataclass(slots=True, frozen=True)
class StepForm:
    """A form, and the sizes that a launch goes by."""

    name: str  # as the kernel knows it
    parts: int  # numbers in a word of 16 bits
    lines: tuple[int, ...]  # of a row, in a stage; the first that fits
    sides: int  # tensors beside a weight
    serves: Callable[[StepWeight], bool]
    # (groups of rows that a program has of a weight, rows of a group, lines of one of them, lines of a stage) ->
    # fp32 numbers in rows and columns that are kept in shared memory of what stands beside the weight.
    kept: Callable[[int, int, int, int], tuple[int, int]]


def _is_bf16(weight: StepWeight) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16


BF16 = StepForm("bf16", 1, (16,), 0, _is_bf16, lambda *_: (1, 4))
FORMS = (BF16,)


def form_of(weights: Iterable[StepWeight]) -> StepForm | None:
    """The one that all of them have; None: they have none, or several."""
    found = {next((form for form in FORMS if form.serves(weight)), None) for weight in weights}
    return found.pop() if len(found) == 1 else None


def words_of(weight: StepWeight) -> torch.Tensor:
    """Returns [N, words], which the copy engine reads."""
    return weight if isinstance(weight, torch.Tensor) else weight.words


def beside(weight: StepWeight) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that stand beside it."""
    if isinstance(weight, torch.Tensor):
        return ()
    return (weight.scales,) if weight.offsets is None else (weight.scales, weight.offsets)
