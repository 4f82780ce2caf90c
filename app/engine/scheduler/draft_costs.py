"""Measures what steps take by how many rows decode and how many drafts each of them brings.

Rows are told apart by powers of two. The times of one such number of rows move together (contexts grow, a machine gets
busy), so what a step tells of its own number of drafts moves the others, too. Until a number of drafts was measured a
few times it is taken to be cheap, so that it is tried: a first step may have been slow for another reason.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

ENOUGH = 3  # measurements
WEIGHT, SHARED_WEIGHT = 0.2, 0.1  # of a new one, for its own number of drafts and for all
CHEAP = 1.01  # times as long for the next number of drafts, where nothing is known of any
SHORTEST_S = 1e-9
MOST_SLOWER = 0.15  # of the time, by which a step counts as slower: one that something stopped tells nothing


class DraftCosts:
    """Moving averages in seconds [rows as a power of two, numbers of drafts]."""

    def __init__(self, counts: Sequence[int], max_num_rows: int) -> None:
        """`counts`: the numbers of drafts, ascending, from 0."""
        shape = (max_num_rows.bit_length() + 1, len(counts))
        self._counts = np.array(counts)
        self._times: FloatArray = np.zeros(shape)
        self._measured = np.zeros(shape, np.int64)

    def observe(self, num_rows: int, index: int, step_time_s: float) -> None:
        """A step of so many rows, each with `counts[index]` drafts, took so long."""
        if step_time_s <= 0.0:
            return
        times, measured = self._times[num_rows.bit_length()], self._measured[num_rows.bit_length()]
        measured[index] += 1
        if measured[index] <= ENOUGH:
            times[index] = step_time_s if measured[index] == 1 else min(times[index], step_time_s)
            return
        error = min(step_time_s - times[index], MOST_SLOWER * times[index])
        times[measured > 0] += SHARED_WEIGHT * error
        times[index] += (WEIGHT - SHARED_WEIGHT) * error
        np.maximum(times, SHORTEST_S, out=times)

    def estimate(self, num_rows: int) -> FloatArray | None:
        """Seconds [numbers of drafts] of a step of so many rows; None: nothing is known of a step without drafts.

        Those that never were measured are tried one behind the other, each once the one before is known.
        """
        measured = self._measured[num_rows.bit_length()]
        times: FloatArray = self._times[num_rows.bit_length()].copy()
        if not measured[0]:
            return None
        for index in np.flatnonzero(measured < ENOUGH).tolist():
            if index:
                cheap = self._continued(times, index)
                times[index] = min(times[index], cheap) if measured[index] else cheap
        unknown = np.flatnonzero(measured == 0)
        times[unknown[1:]] = np.inf
        if len(unknown) and measured[unknown[0] - 1] < ENOUGH:
            times[unknown[0]] = np.inf
        return times

    def forget(self, num_rows: int, index: int) -> None:
        """Let `counts[index]` drafts be measured anew, should they seem worth it at what their neighbours cost."""
        measured = self._measured[num_rows.bit_length()]
        measured[index] = min(measured[index], ENOUGH - 1)

    def _continued(self, times: FloatArray, index: int) -> float:
        """Half as steep as the two numbers before."""
        counts, last = self._counts, float(times[index - 1])
        if index == 1:
            return CHEAP * last
        slope = max(0.0, last - float(times[index - 2])) / float(counts[index - 1] - counts[index - 2])
        return last + 0.5 * slope * float(counts[index] - counts[index - 1])
