"""Where a step's tokens lie, from the counts that the device keeps of its rows: the contract that every device keeps.

Each row has two counts, and only the device knows them exactly (I1): `num_computed` tokens are in the KV cache, and
`num_tokens` are known, or will be once the steps before this one have sampled them. `begin_step` is a step's first
kernel. The host says which rows take part and how many tokens each of them computes; positions, slots, lengths and the
places of sampled tokens follow from the counts, which it moves on: the device never asks the host where a row stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from app.platforms import platform_of
from app.registry import Registry


@dataclass(slots=True, frozen=True)
class RowColumns:
    """What the device keeps of all rows."""

    num_computed: torch.Tensor  # int32 [rows]
    num_tokens: torch.Tensor  # int32 [rows]
    # int32 [rows * W + 2]: W token ids a row; then one that padding reads, and one that it writes.
    flat_token_ids: torch.Tensor
    # int32 [G * rows, M]: the tables of all rows, once for each of G groups of layers that keep blocks of their own.
    block_table: torch.Tensor
    width: int  # W
    block_size: int


PER_TOKEN = (torch.int32, torch.int64, torch.int64, torch.int64, torch.int64)


@dataclass(slots=True, frozen=True)
class StepTensors:
    """What a step reads: of its T tokens, and of its R rows."""

    input_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T], -1 = do not write
    lengths: torch.Tensor  # int64 [T] tokens up to this one = absolute position of the token that follows it
    targets: torch.Tensor  # int64 [T] place of that token in flat_token_ids
    rows: torch.Tensor  # int32 [R], 0 for padding
    seq_lens: torch.Tensor  # int32 [R] computed after the step
    more_slots: torch.Tensor  # int64 [G - 1, T] `slots` of the further groups; each begins at a multiple of 16 bytes

    @classmethod
    def empty(cls, num_tokens: int, num_rows: int, device: torch.device, num_groups: int = 1) -> StepTensors:
        """Empty tensors for `begin_step` to fill."""
        tokens = [torch.empty(num_tokens, dtype=dtype, device=device) for dtype in PER_TOKEN]
        rows = [torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2)]
        more = torch.empty(num_groups - 1, num_tokens + num_tokens % 2, dtype=torch.int64, device=device)
        return cls(*tokens, *rows, *[more[:, :num_tokens]])

    @classmethod
    def zeros(cls, num_tokens: int, num_rows: int, device: torch.device, num_groups: int = 1) -> StepTensors:
        """Token 0 of row 0 throughout."""
        made = cls.empty(num_tokens, num_rows, device, num_groups)
        for field in fields(made):
            getattr(made, field.name).zero_()
        return made

    def first(self, size: int) -> StepTensors:
        """Those of a step of `size` rows with one token each: the same memory."""
        return StepTensors(*(getattr(self, field.name)[..., :size] for field in fields(self)))


BEGIN_STEP: Registry[Callable[[torch.Tensor, torch.Tensor, RowColumns, StepTensors], None]] = Registry(
    "begin_step",
    {
        "torch": "app.kernels.rows.reference:begin_step",
        "triton": "app.kernels.rows.triton_ops:begin_step",
    },
)


def begin_step(rows: torch.Tensor, starts: torch.Tensor, columns: RowColumns, out: StepTensors) -> None:
    """Fill `out`, and move the counts of `rows` on.

    rows int32 [R], each at most once; -1 pads: such a row has one token, at position 0, writes no keys or values (slot
    -1), and reads and writes the last two entries of flat_token_ids. starts int32 [R + 1]: row i brings the tokens from
    starts[i] to starts[i + 1], which follow its `num_computed`; those of draft tokens stand in its token ids already.
    Afterwards `num_computed` counts them, and where it has come to `num_tokens` or past it (drafts), the row samples:
    `num_tokens` is one more than `num_computed` then.
    """
    BEGIN_STEP.load(platform_of(rows.device).kernels)(rows, starts, columns, out)
