"""The ends of steps with drafts: which of them stay, where new ones stand, and where passes ahead of them lie: the
contract that every device keeps.

All of it is a few numbers a row, so what it costs a GPU is its launches: one for each operation here, three for
n-grams. No row has more than `MOST_PLACES` drafts and known tokens in a step or a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from app.kernels.kernel_table import TRITON, Candidate, KernelTable
from app.kernels.rows import RowColumns, StepTensors

MOST_PLACES = 64


@dataclass(slots=True, frozen=True)
class LogitsPlaces:
    """Says where N rows have their logits among L: one for the token after the known ones, then one after each
    draft."""

    firsts: torch.Tensor  # int32 [N] of each row
    counts: torch.Tensor  # int32 [N] how many each has


class AcceptDrafts(Protocol):
    """The operation that keeps the draft tokens before the first that is not the token sampled in its place."""

    def __call__(
        self,
        columns: RowColumns,
        rows: torch.Tensor,
        places: LogitsPlaces | None,
        targets: torch.Tensor,
        token_ids: torch.Tensor,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the sampled tokens into the rows, whose counts go back by the drafts that are rejected.

        rows int32 [N], each at most once, with drafts behind their known tokens; those below 0 pad, and nothing of them
        is counted. No places: none has drafts, and each its one logits. targets int64 [L] and token_ids int64 [L]: the
        place in `flat_token_ids`, and the token, that each of the logits gave; ids outside of the vocabulary (of
        kernels that did not run) become some that is in it. Returns int64 [N], how many tokens each row got, and int64
        [N], the place of the last of them among the logits. What is sampled behind a rejected draft is written too, and
        overwritten by the next drafts or tokens.
        """


class WriteDrafts(Protocol):
    """The operation that leaves new drafts with their rows."""

    def __call__(self, columns: RowColumns, rows: torch.Tensor, drafts: torch.Tensor) -> None:
        """drafts int64 [N, P] behind the known tokens of rows int32 [N], as far as there is room; those below 0 pad."""


@dataclass(slots=True, frozen=True)
class PassPlaces:
    """Says where the T tokens of a pass lie."""

    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [G, T] for each group of layers; each begins at a multiple of 16 bytes
    seq_lens: torch.Tensor  # int32 [T] tokens that each of them sees


class PlaceDrafts(Protocol):
    """The operation that finds the places of a pass ahead of a step's tokens."""

    def __call__(
        self,
        columns: RowColumns,
        rows: torch.Tensor,
        step: StepTensors,
        ends: torch.Tensor,
        ahead: int,
        each: int,
        *,
        sees_block: bool,
    ) -> PassPlaces:
        """`each` tokens of each of rows int64 [N], the first one `ahead` positions behind the step's token `ends[n]`.

        A token has a slot where its row has a block for it (`num_blocks`), and the step's token one. It sees those
        before it and its own, or all `each` of its row.
        """


class ContinueNgrams(Protocol):
    """The operation that drafts what followed the newest tokens where they stood before."""

    def __call__(
        self, columns: RowColumns, rows: torch.Tensor, shortest: int, longest: int, count: int
    ) -> torch.Tensor:
        """Drafts int64 [N, count] of rows int64 [N], of which at least one token is known.

        Of the longest run of newest tokens, of `shortest` to `longest`, that stands before in the row, the latest place
        counts. What followed it is copied, drafts too where it reaches them. A row without a match repeats its newest
        token.
        """


class RepeatParameters(Protocol):
    """The operation that gives each place of a row what its draws go by."""

    def __call__(self, parameters: Sequence[torch.Tensor], each: int) -> tuple[torch.Tensor, ...]:
        """temperature, top_k, top_p, min_p [N] and keys [N, 2] of `SampleTokens`, each row's `each` times."""


ACCEPT_DRAFTS: KernelTable[AcceptDrafts] = KernelTable(
    "accept_drafts",
    Candidate("app.kernels.drafts.triton_ops:accept_drafts", TRITON),
    Candidate("app.kernels.drafts.reference:accept_drafts"),
)

WRITE_DRAFTS: KernelTable[WriteDrafts] = KernelTable(
    "write_drafts",
    Candidate("app.kernels.drafts.triton_ops:write_drafts", TRITON),
    Candidate("app.kernels.drafts.reference:write_drafts"),
)

PLACE_DRAFTS: KernelTable[PlaceDrafts] = KernelTable(
    "place_drafts",
    Candidate("app.kernels.drafts.triton_ops:place_drafts", TRITON),
    Candidate("app.kernels.drafts.reference:place_drafts"),
)

CONTINUE_NGRAMS: KernelTable[ContinueNgrams] = KernelTable(
    "continue_ngrams",
    Candidate("app.kernels.drafts.triton_ngram:continue_ngrams", TRITON),
    Candidate("app.kernels.drafts.reference:continue_ngrams"),
)

REPEAT_PARAMETERS: KernelTable[RepeatParameters] = KernelTable(
    "repeat_parameters",
    Candidate("app.kernels.drafts.triton_ops:repeat_parameters", TRITON),
    Candidate("app.kernels.drafts.reference:repeat_parameters"),
)
