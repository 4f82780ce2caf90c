"""Keys and values of a drafter whose drafts nobody asks for: those of several steps are made in one pass.

On a CPU a pass over few tokens is mostly calls: made in each step, it takes a tenth of a step's time where there are
no drafts. So what it reads waits, until drafts are asked for, or somebody may read these slots of the cache or write to
them: a request that comes or goes, blocks that are copied elsewhere. Until then each slot is its request's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from app.layers.attention import Attention
from app.layers.attention_layer import AttentionLayer
from app.layers.context import ForwardContext, HiddenStates
from app.records.step import SchedulerOutput

MOST_TOKENS = 1024  # that wait
MOST_OF_STEP = 256  # a step of more fills a pass of its own
Keep = Callable[[torch.Tensor, HiddenStates, ForwardContext], None]  # (tokens behind each [T], of these, their context)


@dataclass(slots=True, frozen=True)
class _Step:
    following: torch.Tensor  # int [T]
    hidden: HiddenStates
    ctx: ForwardContext


class LateKeys:
    """Holds what one drafter has yet to keep."""

    def __init__(self, keep: Keep, own: Sequence[AttentionLayer], others: Sequence[AttentionLayer]) -> None:
        """`own`: the drafter's layers, `others`: the target's."""
        self._keep, self._layers = keep, [layer.layer_index for layer in own]
        # Others plan a pass by more than its slots. A window's blocks are another request's before their own one ends.
        self._may_wait = all(isinstance(layer, Attention) for layer in own)
        self._may_wait &= not any(getattr(layer, "sliding_window", None) for layer in (*own, *others))
        self._steps: list[_Step] = []
        self._num_tokens = 0

    def add(self, following: torch.Tensor, hidden: HiddenStates, ctx: ForwardContext) -> None:
        """A step of T tokens without drafts, of which those behind each are known, int [T]: now or later."""
        num_tokens = len(following)
        may_wait = self._may_wait and following.device.type == "cpu" and not ctx.attention[0].is_static
        if not may_wait or ctx.inputs or num_tokens > MOST_OF_STEP:
            self._keep(following, hidden, ctx)
            return
        if self._num_tokens + num_tokens > MOST_TOKENS:
            self.settle()
        self._steps.append(_Step(following, hidden, ctx))
        self._num_tokens += num_tokens

    def settle(self) -> None:
        """Keep all that waits."""
        if not self._steps:
            return
        steps, self._steps, self._num_tokens = self._steps, [], 0
        last = torch.cat([step.hidden.last for step in steps])
        read = {layer: torch.cat([step.hidden.inputs_of[layer] for step in steps]) for layer in steps[0].ctx.wanted}
        self._keep(torch.cat([step.following for step in steps]), HiddenStates(last, read), self._context(steps))

    def settle_before(self, step: SchedulerOutput) -> None:
        """Keep all before the step message is applied, if it gives away slots or lets others read them."""
        if step.freed_rows or step.new_requests or step.transfers is not None:
            self.settle()

    def forget(self) -> None:
        """The cache is another one."""
        self._steps, self._num_tokens = [], 0

    def _context(self, steps: Sequence[_Step]) -> ForwardContext:
        """Says where all of their tokens lie, and nothing else."""
        last = steps[-1].ctx
        attention = list(last.attention)
        for layer in self._layers:
            slots = torch.cat([step.ctx.attention[layer].slot_mapping for step in steps])
            attention[layer] = replace(attention[layer], slot_mapping=slots, plan=None)
        positions = torch.cat([step.ctx.positions for step in steps])
        return replace(last, positions=positions, attention=attention, memo={}, kept={})
