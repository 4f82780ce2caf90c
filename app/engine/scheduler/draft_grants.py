"""Shares what a step has left among the draft tokens of its decodes."""

from __future__ import annotations

import numpy as np

from app.engine.scheduler.row_table import IntArray, RowTable
from app.engine.scheduler.slots import Slots
from app.engine.scheduler.step_plan import StepPlan


def grant_drafts(decodes: IntArray, plan: StepPlan, rows: RowTable, slots: Slots, num_draft_slots: int = 0) -> IntArray:
    """Draft tokens for the decodes, from what nobody else wanted of tokens and free blocks; rows with none first.

    No row gets so many that its step could bring more tokens than it may have. Behind those, rows get `num_draft_slots`
    slots that a drafter may write to, at most one more than it is to propose, as far as blocks are free and the row may
    ever have so many tokens.
    """
    next_position = rows.num_computed[decodes] + 1
    drafts = np.minimum(rows.num_drafts[decodes], rows.limit[decodes] - next_position)
    drafts = np.minimum(drafts, np.maximum(plan.budget.left - (drafts.cumsum() - drafts), 0))
    slots_ahead = min(num_draft_slots, plan.num_proposed + 1) * rows.may_draft[decodes] * bool(plan.num_proposed)
    wanted = np.minimum(drafts + slots_ahead, np.maximum(rows.limit[decodes] - next_position, drafts))
    for index in np.flatnonzero(next_position + wanted > rows.capacity[decodes]).tolist():
        row = int(decodes[index])
        room = min(int(wanted[index]), slots.room(rows.request_at(row), int(next_position[index])))
        granted = slots.ensure(rows.request_at(row), int(next_position[index]) + room, plan)
        assert granted
        drafts[index] = min(drafts[index], room)
    plan.budget.left -= int(drafts.sum())
    order = np.argsort(drafts > 0, kind="stable")
    plan.drafts = drafts[order] if drafts.any() else None
    return decodes[order]
