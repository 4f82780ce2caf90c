"""Shares what a step has left among the draft tokens of its decodes."""

from __future__ import annotations

import numpy as np

from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.slots import Slots
from app.engine.scheduler.step_plan import StepPlan


def grant_drafts(decodes: IntArray, plan: StepPlan, rows: RowTable, slots: Slots) -> IntArray:
    """Draft tokens for the decodes, from what nobody else wanted of tokens and free blocks; rows with none first.

    No row gets so many that its step could bring more tokens than it may have.
    """
    next_position = rows.num_computed[decodes] + 1
    drafts = np.minimum(rows.num_drafts[decodes], rows.limit[decodes] - next_position)
    drafts = np.minimum(drafts, np.maximum(plan.budget.left - (drafts.cumsum() - drafts), 0))
    for index in np.flatnonzero(next_position + drafts > rows.capacity[decodes]).tolist():
        row = int(decodes[index])
        room = min(int(drafts[index]), slots.room(rows.request_at(row), int(next_position[index])))
        granted = slots.ensure(rows.request_at(row), int(next_position[index]) + room, plan)
        assert granted
        drafts[index] = room
    plan.budget.left -= int(drafts.sum())
    order = np.argsort(drafts > 0, kind="stable")
    plan.drafts = drafts[order] if drafts.any() else None
    return decodes[order]
