"""The fast path of a step that only decodes: the rows of the step before, each one token further.

Nearly all steps of a busy engine are such. While no request comes, goes or is held, what such a step is made of stays
the same, but for its number and for the blocks of rows at a block's edge; so it is made once, and remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.engine.scheduler.in_flight import InFlightStep
from app.engine.scheduler.row_table import IntArray, RowTable


@dataclass(slots=True)
class SteadyDecode:
    """The rows of a step in which each of them computed one token and sampled, and no other row had anything to do.

    Rows with a grammar are none of them, nor beside them: they take a turn when a token comes back.
    """

    step: InFlightStep  # whose arrays the next steps share
    takes_part: NDArray[np.bool_]  # [max_num_seqs]
    one_each: NDArray[np.int32]  # [max_num_seqs], 1 for each row that takes part
    by_edge: IntArray  # its rows, by the steps after which they first need another block
    edges: list[int]  # [block_size + 1] where in `by_edge` the rows begin that do so after 0, 1, .. steps
    num_done: int  # steps since
    num_left: int  # further steps until one of the rows has computed all it may
    changes: int  # of the table, then

    @classmethod
    def of(cls, step: InFlightStep, table: RowTable, block_size: int) -> SteadyDecode | None:
        """After `step` was written; None: the next one needs a plan."""
        rows = step.rows
        if len(rows) != step.num_tokens or not step.samples.all() or table.has_grammar.any():
            return None
        computed = table.num_computed[rows]
        until_edge = table.capacity[rows] - computed
        if until_edge.max() >= block_size:  # it has more blocks than it needs yet
            return None
        by_edge = rows[np.argsort(until_edge, kind="stable")].astype(np.intp)
        edges = np.bincount(until_edge, minlength=block_size).cumsum().tolist()
        takes_part = np.zeros_like(table.runnable)
        takes_part[rows] = True
        num_left = int((table.limit[rows] - computed).min())
        return cls(step, takes_part, takes_part.astype(np.int32), by_edge, [0, *edges], 0, num_left, table.num_changes)

    def goes_on(self, table: RowTable) -> bool:
        """True if the next step is another one of these. Rows that did nothing have nothing to do then either: they are
        held, or wait for tokens, after which they leave."""
        return self.num_left > 0 and self.changes == table.num_changes

    def at_block_edge(self) -> IntArray:
        """Rows that need one more block for their next token: each of them once every `block_size` steps."""
        first = self.num_done % (len(self.edges) - 1)
        return self.by_edge[self.edges[first] : self.edges[first + 1]]

    def advance(self, step_id: int, table: RowTable) -> InFlightStep:
        """Count the next step, whose blocks are there."""
        self.num_left -= 1
        self.num_done += 1
        table.num_computed += self.one_each
        table.num_tokens += self.one_each
        np.copyto(table.last_step, step_id, where=self.takes_part)
        last = self.step
        return InFlightStep(
            step_id,
            last.rows,
            last.num_scheduled_tokens,
            last.samples,
            last.generations,
            last.num_tokens,
            last.num_tokens,
        )
