"""Finds where a step's tokens lie, from the counts that the device keeps of its rows: the contract that every device
keeps.

Each row has two counts, and only the device knows them exactly (I1): `num_computed` tokens are in the KV cache, and
`num_tokens` are known, or will be once the steps before this one have sampled them. `begin_step` is a step's first
kernel. The host says which rows take part and how many tokens each of them computes; positions, slots, lengths and the
places of sampled tokens follow from the counts, which it moves on: the device never asks the host where a row stands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch

from app.kernels.kernel_table import TRITON, Candidate, KernelTable


@dataclass(slots=True, frozen=True)
class RowColumns:
    """Holds what the device keeps of all rows."""

    num_computed: torch.Tensor  # int32 [rows]
    num_tokens: torch.Tensor  # int32 [rows]
    # int32 [rows * W + 2]: W token ids a row; then one that padding reads, and one that it writes.
    flat_token_ids: torch.Tensor
    # int32 [G * rows, M]: the tables of all rows, once for each of G groups of layers that keep blocks of their own.
    block_table: torch.Tensor
    width: int  # W
    block_size: int
    # int64 [rows]: places of each row in the tables that hold a block of its own.
    num_blocks: torch.Tensor | None = None


PER_TOKEN = (torch.int32, torch.int64, torch.int64, torch.int64, torch.int64)


@dataclass(slots=True, frozen=True)
class StepTensors:
    """Holds what a step reads: of its T tokens, and of its R rows."""

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

    def first(self, num_rows: int, tokens_each: int = 1) -> StepTensors:
        """Those of a step of so many rows with so many tokens each: the same memory."""
        sizes = {name: num_rows if name in PER_ROW else num_rows * tokens_each for name in self.__slots__}
        return StepTensors(*(getattr(self, name)[..., :size] for name, size in sizes.items()))


PER_ROW = frozenset({"rows", "seq_lens"})


class BeginStep(Protocol):
    """The first kernel of a step."""

    def __call__(
        self,
        rows: torch.Tensor,
        starts: torch.Tensor,
        columns: RowColumns,
        out: StepTensors,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Fill `out`, and move the counts of `rows` on.

        rows int32 [R], each at most once; -1 pads. starts int32 [R + 1]: row i has the places from starts[i] to
        starts[i + 1], for tokens that follow its `num_computed`; those of draft tokens stand in its token ids already.
        counts int32 [R]: only so many of a row's places, from the first on, hold a token (None: all); in the others,
        and in all of a row that pads, stands padding: it has position 0, writes no keys or values (slot -1), and reads
        and writes the last two entries of flat_token_ids. `seq_lens` counts a row's padding, too: so a token's position
        follows from its place, and a row's width must have room for it.
        Afterwards `num_computed` counts the tokens, and where it has come to `num_tokens` or past it (drafts), the row
        samples: `num_tokens` is one more than `num_computed` then.
        """


BEGIN_STEP: KernelTable[BeginStep] = KernelTable(
    "begin_step",
    Candidate("app.kernels.rows.triton_ops:begin_step", TRITON),
    Candidate("app.kernels.rows.reference:begin_step"),
)
