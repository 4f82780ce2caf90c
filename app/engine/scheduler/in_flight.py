"""Holds what the scheduler remembers of a step until its output is back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.records.step import Int32Array, ModelRunnerOutput


@dataclass(slots=True)
class InFlightStep:
    """A submitted step: rows, tokens and the generations of the requests that sat in the rows."""

    step_id: int
    rows: Int32Array  # [R]
    num_scheduled_tokens: Int32Array  # [R], drafts included
    samples: NDArray[np.bool_]  # [R]
    generations: NDArray[np.int64]  # [R]
    num_tokens: int
    num_decode_tokens: int  # those of decodes, drafts included
    num_draft_tokens: Int32Array | None = None  # [R]; None: no row has any
    num_proposed: int = 0  # that those which sample are to have after it

    def rejected(self, output: ModelRunnerOutput) -> Int32Array | None:
        """[R] draft tokens that the step computed in vain; None: it had none."""
        drafts, sampled = self.num_draft_tokens, output.num_sampled_tokens
        if drafts is None:
            return None
        assert sampled is not None, f"step {self.step_id}: the output does not say how many tokens each row got"
        rejected = drafts.copy()
        rejected[self.samples] -= sampled - 1
        assert ((rejected >= 0) & (rejected <= drafts)).all(), f"step {self.step_id}: tokens that nobody asked for"
        return rejected

    def accepted(self, rejected: Int32Array | None) -> Int32Array | None:
        """[R] draft tokens that were right; None: the step had none."""
        return None if rejected is None or self.num_draft_tokens is None else self.num_draft_tokens - rejected
