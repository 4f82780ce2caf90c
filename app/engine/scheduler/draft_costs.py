"""Measures what steps take by how many rows decode and how many drafts each of them brings.

Rows are told apart by powers of two. Within one, a time stands for the rows that it was measured at, and grows with
them as it does from one power to its neighbour: on a CPU that is most of it. The times of one such number of rows move
together (contexts grow, a machine gets busy), so what a step tells of its own number of drafts moves the others, too.
Until a number of drafts was measured a few times it is taken to be cheap, so that it is tried: a first step may have
been slow for another reason.
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
        self._rows: FloatArray = np.zeros(shape)  # that the times are of

    def observe(self, num_rows: int, index: int, step_time_s: float) -> None:
        """A step of so many rows, each with `counts[index]` drafts, took so long."""
        if step_time_s <= 0.0:
            return
        power = num_rows.bit_length()
        times, measured, rows = self._times[power], self._measured[power], self._rows[power]
        per_row = float(self._per_row(power)[index])
        expected = times[index] + per_row * (num_rows - rows[index])
        measured[index] += 1
        if measured[index] <= ENOUGH:
            if measured[index] == 1 or step_time_s < expected:
                times[index], rows[index] = step_time_s, num_rows
            return
        error = min(step_time_s - expected, MOST_SLOWER * expected)
        times[measured > 0] += SHARED_WEIGHT * error
        moved = WEIGHT * (num_rows - rows[index])
        times[index] += (WEIGHT - SHARED_WEIGHT) * error + per_row * moved
        rows[index] += moved
        np.maximum(times, SHORTEST_S, out=times)

    def estimate(self, num_rows: int) -> FloatArray | None:
        """Seconds [numbers of drafts] of a step of so many rows; None: nothing is known of a step without drafts.

        Those that never were measured are tried one behind the other, each once the one before is known.
        """
        power = num_rows.bit_length()
        measured = self._measured[power]
        if not measured[0]:
            return None
        further = self._per_row(power) * (num_rows - self._rows[power])
        times: FloatArray = np.where(measured > 0, np.maximum(self._times[power] + further, SHORTEST_S), 0.0)
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

    def _per_row(self, power: int) -> FloatArray:
        """Seconds [numbers of drafts] that a further row takes: by the next power of two below or above that is known,
        at most in proportion."""
        times, rows = self._times[power], self._rows[power]
        found: FloatArray = np.zeros(len(times))
        for other in (power + 1, power - 1):  # the one below counts
            if 0 <= other < len(self._times):
                known = (self._measured[power] >= ENOUGH) & (self._measured[other] >= ENOUGH)
                apart = np.where(known, rows - self._rows[other], 1.0)
                slopes = (times - self._times[other]) / np.where(apart == 0.0, 1.0, apart)
                found = np.where(known, np.clip(slopes, 0.0, times / np.maximum(rows, 1.0)), found)
        return found

    def _continued(self, times: FloatArray, index: int) -> float:
        """Half as steep as the two numbers before."""
        counts, last = self._counts, float(times[index - 1])
        if index == 1:
            return CHEAP * last
        slope = max(0.0, last - float(times[index - 2])) / float(counts[index - 1] - counts[index - 2])
        return last + 0.5 * slope * float(counts[index] - counts[index - 1])
