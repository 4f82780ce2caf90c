"""Measures what steps take where that goes by their tokens, as on a CPU: one line through all steps, of any load.

A step takes so long, so much longer for each token (a row's own or a draft of its), and so much for each draft that it
proposes, of which a part goes by rows. What was measured at some number of tokens and drafts proposed is averaged; the
line goes through these averages, the latest above all, and where they leave it open it is as steep as steps of small
models are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

ENOUGH = 3  # measurements, of which the shortest counts: a first step may have been slow for another reason
WEIGHT = 0.2  # of a further one
MOST_SLOWER = 0.15  # of the time, by which a step counts as slower: one that something stopped tells nothing
TOGETHER = 0.1  # of what one is slower or faster, all are: a machine gets busy
FIT_AFTER = 16  # measurements
# What a token takes of a step's own time, what a draft proposed, and that for each row.
USUAL = np.array([1.0, 0.05, 0.15, 0.006])
TRUST = 0.005  # in these, where the latest average counts 1
KEPT, LEAST = 0.99, 0.02  # of an average's weight, at each measurement of another; and at least


class TokenCosts:
    """Averages by the tokens of a step as a power of two, and the drafts that it proposes for each row."""

    def __init__(self) -> None:
        self._averages: dict[tuple[int, int], FloatArray] = {}  # seconds, and what they are of, as in `_of`
        self._counts: dict[tuple[int, int], int] = {}
        self._seen: dict[tuple[int, int], int] = {}  # when each was measured last
        self._now = 0
        self._line: FloatArray | None = None
        self._age = 0

    def observe(self, num_rows: int, num_tokens: int, num_proposed: int, step_time_s: float) -> None:
        """A step of so many rows and tokens, which only decoded, took so long."""
        if step_time_s <= 0.0:
            return
        key, of = (num_tokens.bit_length(), num_proposed), _of(num_rows, num_tokens, num_proposed)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self._now += 1
        self._seen[key] = self._now
        average = self._averages.get(key)
        if average is None or count <= ENOUGH:
            if average is None or step_time_s < average[0]:
                self._averages[key] = np.array([step_time_s, *of])
                self._age = FIT_AFTER
        else:
            # A line that is steeper than these steps are would have far smaller ones take less than no time.
            expected = max(average[0] + float(self._fitted() @ (of - average[1:])), 0.1 * step_time_s)
            error = min(step_time_s / expected - 1.0, MOST_SLOWER)
            for other in self._averages.values():
                other[0] *= 1.0 + TOGETHER * error
            average += WEIGHT * (np.array([expected * (1.0 + error), *of]) - average)
        self._age += 1

    def step_s(self, num_rows: int, num_tokens: int, num_proposed: int) -> float:
        """Seconds of such a step; 0: none was measured yet."""
        return float(self._fitted() @ _of(num_rows, num_tokens, num_proposed))

    @property
    def token_s(self) -> float:
        """Seconds of a further token."""
        return float(self._fitted()[1])

    def _fitted(self) -> FloatArray:
        if self._line is None or self._age >= FIT_AFTER:
            self._line, self._age = self._fit(), 0
        return self._line

    def _fit(self) -> FloatArray:
        """Least squares of the relative errors."""
        if not self._averages:
            return np.zeros(len(USUAL))
        found = np.array([*self._averages.values()])
        times, of = found[:, 0], found[:, 1:]
        usual = USUAL * float(np.median(times / (of @ USUAL)))
        ages = self._now - np.array([self._seen[key] for key in self._averages])
        scaled, weights = of * usual / times[:, None], np.maximum(KEPT**ages, LEAST)
        left = (scaled.T * weights) @ scaled + TRUST * np.eye(len(USUAL))
        line: FloatArray = usual * np.maximum(np.linalg.solve(left, weights @ scaled + TRUST), 0.0)
        return line


def _of(num_rows: int, num_tokens: int, num_proposed: int) -> FloatArray:
    return np.array([1.0, num_tokens, num_proposed, num_proposed * num_rows])
