"""Forms of weights that a whole step multiplies by; in Gluon they are in `gluon_forms`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from app.kernels.gemm.stored import BLOCK, Form, StoredTiles
from app.kernels.gemm.tiled import TiledWeight
from app.kernels.launch import next_power_of_2
from app.kernels.moe.stacked import StackedExperts
from app.kernels.whole_step import StepWeight

MOST_STAGES = 12  # of the ring that weights are copied into


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


def _is_stored(weight: StepWeight, form: Form, *, by_blocks: bool = False) -> bool:
    """True if kernels find such numbers, and a scale for each row or for each block of 128 rows and inputs."""
    tiles = tiles_of(weight)
    if tiles is None or tiles.form != form or tiles.offsets is not None:
        return False
    is_even = tiles.block == BLOCK and tiles.size % BLOCK == 0 and tiles.scales.dtype == torch.float32
    if by_blocks:
        return is_even and tiles.group == tiles.scale_rows == BLOCK and weight.shape[-2] % BLOCK == 0
    return is_even and tiles.scales_of_block == 0


def _rows(groups: int, group: int, lines: int, of_stage: int) -> tuple[int, int]:
    """A number for each row."""
    return next_power_of_2(groups), group


def _blocks(groups: int, group: int, lines: int, of_stage: int) -> tuple[int, int]:
    """A number for each line of a group of rows."""
    return next_power_of_2(groups * -(-lines // of_stage)), of_stage


def _is_of_nibbles(weight: StepWeight, sides: tuple[torch.dtype, ...]) -> bool:
    """True if a scale, and an offset if there are any, stand beside each block, in these types."""
    if not isinstance(weight, StoredTiles) or (weight.form, weight.block, weight.group) != ("nibble", BLOCK, BLOCK):
        return False
    found = (weight.scales.dtype,) if weight.offsets is None else (weight.scales.dtype, weight.offsets.dtype)
    return weight.size % BLOCK == 0 and weight.scale_rows == 1 and found == sides


def _tiles(groups: int, group: int, lines: int, of_stage: int, sides: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """A row for what blocks of the vector add up to, and one for each stage: two blocks of each line of a group."""
    return 1 + MOST_STAGES, len(sides) * 2 * of_stage * group * max(one.itemsize for one in sides) // 4


def _nibbles(*sides: torch.dtype) -> StepForm:
    name = " ".join(["nibble", *(str(one).removeprefix("torch.") for one in sides)])
    serves, kept = partial(_is_of_nibbles, sides=sides), partial(_tiles, sides=sides)
    return StepForm(name, 4, (8,), len(sides), serves, kept)


BF16 = StepForm("bf16", 1, (16,), 0, _is_bf16, lambda *_: (1, 4))
INT8 = StepForm("int8", 2, (16, 8), 1, partial(_is_stored, form="int8"), _rows)
FP8 = StepForm("e4m3", 2, (16, 8), 1, partial(_is_stored, form="e4m3"), _rows)
FP8_BLOCKS = StepForm("e4m3 blocks", 2, (8, 16), 1, partial(_is_stored, form="e4m3", by_blocks=True), _blocks)
_SIDES = (torch.float16, torch.bfloat16, torch.float32)
NIBBLES = tuple(_nibbles(scales, *offsets) for scales in _SIDES for offsets in ((), *((one,) for one in _SIDES)))
FORMS = (BF16, INT8, FP8, FP8_BLOCKS, *NIBBLES)


def form_of(weights: Iterable[StepWeight]) -> StepForm | None:
    """The one that all of them have; None: they have none, or several."""
    found = {next((form for form in FORMS if form.serves(weight)), None) for weight in weights}
    return found.pop() if len(found) == 1 else None


def tiles_of(weight: StepWeight) -> StoredTiles | None:
    """Tells how a weight is stored; of experts tensors have one dimension more. None: it is not."""
    if isinstance(weight, StackedExperts):
        return weight.packed.stored if isinstance(weight.packed, TiledWeight) else None
    return None if isinstance(weight, torch.Tensor) else weight


def words_of(weight: StepWeight) -> torch.Tensor:
    """Returns [N, words], which the copy engine reads; of experts one behind the other."""
    if isinstance(weight, torch.Tensor):
        return weight
    tiles = tiles_of(weight)
    assert tiles is not None
    return tiles.words


def beside(weight: StepWeight) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that stand beside it."""
    tiles = tiles_of(weight)
    if tiles is None:
        return ()
    return (tiles.scales,) if tiles.offsets is None else (tiles.scales, tiles.offsets)
