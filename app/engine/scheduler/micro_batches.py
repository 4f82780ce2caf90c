"""Chooses which decodes a step message takes when the model is a pipeline.

A row whose last token is still being computed makes the first stage wait for the last one. So with P stages the rows
are dealt into P step messages: a step message takes rows that none of the P - 1 step messages before it took (or whose
token is back), the longest unserved first, and no more than its share, so that all stages have something to do at any
time.
"""

from __future__ import annotations

import numpy as np

from app.engine.scheduler.row_table import IntArray


def micro_batch(
    decodes: IntArray, last_step: IntArray, next_step: int, last_returned: int, num_stages: int
) -> IntArray:
    """Those of `decodes` (rows, ascending) that step message `next_step` takes; `last_step`: each row's last step
    message."""
    last = last_step[decodes]
    free = decodes[last <= max(next_step - num_stages, last_returned)]
    share = -(-decodes.size // num_stages)
    if free.size <= share:
        return free
    oldest = np.argsort(last_step[free], kind="stable")[:share]
    return np.sort(free[oldest])
