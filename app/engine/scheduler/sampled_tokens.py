"""The tokens that a step brought, by row: one each, or several where drafts were accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.in_flight import InFlightStep
from app.records.step import Float32Array, Int32Array, ModelRunnerOutput, TokenLogprobs


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """N rows that sampled, and their T tokens, one row's behind the other's."""

    rows: Int32Array  # [N]
    flat: Int32Array  # [T]
    num_each: Int32Array | None  # [N]; None: one each
    logprobs: list[TokenLogprobs | None] | None  # [T]
    figures: dict[str, Float32Array]  # [T] by name
    pooled: list[Float32Array | None] | None = None  # [N]

    @classmethod
    def of(cls, step: InFlightStep, output: ModelRunnerOutput) -> SampledTokens:
        """Returns what came back for the step's rows that sample."""
        rows, flat, num_each = step.rows[step.samples], output.sampled_token_ids, output.num_sampled_tokens
        num_expected = len(rows) if num_each is None else int(num_each.sum())
        assert len(flat) == num_expected, f"step {step.step_id}: {len(flat)} tokens for {len(rows)} rows"
        if figures := output.token_figures:
            assert {len(values) for values in figures.values()} == {len(flat)}, f"step {step.step_id}: others' figures"
        return cls(rows, flat, num_each, output.logprobs, figures, output.pooled)

    @property
    def counts(self) -> Int32Array | np.int32:
        """Tokens of each row: [N], or 1 for all."""
        return np.int32(1) if self.num_each is None else self.num_each

    def pieces(self) -> list[list[int]]:
        """Each row's tokens."""
        tokens: list[int] = self.flat.tolist()
        if self.num_each is None:
            return [[token] for token in tokens]
        return [tokens[first:end] for first, end in self._spans()]

    def logprobs_of(self, index: int) -> list[TokenLogprobs | None] | None:
        """Entries of the tokens of row `rows[index]`; None: nobody asked."""
        if self.logprobs is None:
            return None
        return self.logprobs[self._span(index)]

    def figures_of(self, index: int) -> dict[str, list[float]]:
        """Returns what features found out of the tokens of row `rows[index]`."""
        span = self._span(index) if self.figures else slice(0)
        return {name: values[span].tolist() for name, values in self.figures.items()}

    def pooled_of(self, index: int) -> Float32Array | None:
        """Returns what was made of the prompt of row `rows[index]`; None: nothing."""
        return None if self.pooled is None else self.pooled[index]

    def any_is(self, token: int) -> NDArray[np.bool_]:
        """[N] whether `token` is among a row's tokens."""
        found: NDArray[np.bool_] = self.flat == token
        if self.num_each is None or not len(self.rows):
            return found
        each: NDArray[np.bool_] = np.logical_or.reduceat(found, np.cumsum(self.num_each) - self.num_each)
        return each

    def spread(self, values: NDArray[Any], of: NDArray[np.bool_]) -> NDArray[Any]:
        """`values` [N] of the rows where `of` is True, once for each of their tokens."""
        return values[of] if self.num_each is None else np.repeat(values[of], self.num_each[of])

    def select(self, here: NDArray[np.bool_]) -> SampledTokens:
        """Those of the rows where `here` [N] is True."""
        if self.num_each is None:
            tokens, num_each = here, None
        else:
            tokens, num_each = np.repeat(here, self.num_each), self.num_each[here]
        chosen = None if self.logprobs is None else [self.logprobs[i] for i in np.flatnonzero(tokens).tolist()]
        figures = {name: values[tokens] for name, values in self.figures.items()}
        pooled = None if self.pooled is None else [self.pooled[i] for i in np.flatnonzero(here).tolist()]
        return SampledTokens(self.rows[here], self.flat[tokens], num_each, chosen, figures, pooled)

    def _span(self, index: int) -> slice:
        return slice(index, index + 1) if self.num_each is None else slice(*self._spans()[index])

    def _spans(self) -> list[tuple[int, int]]:
        assert self.num_each is not None
        ends = np.cumsum(self.num_each)
        return list(zip((ends - self.num_each).tolist(), ends.tolist(), strict=True))
