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
    positions: torch.Tensor  # int64 [T]
    slots: list[torch.Tensor]  # int64 [T] in each of the drafter's layers


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
        self._ctx: ForwardContext | None = None  # of the first that waits, without what only its own pass reads

    def add(self, following: torch.Tensor, hidden: HiddenStates, ctx: ForwardContext) -> None:
        """A step of T tokens that proposes nothing, of which those behind each are known, int [T]: now or later."""
        num_tokens = len(following)
        if not self._waits(following, ctx):
            self.settle()
            self._keep(following, hidden, ctx)
            return
        if self._num_tokens + num_tokens > MOST_TOKENS:
            self.settle()
        if not self._steps:
            attention = [replace(meta, plan=None) for meta in ctx.attention]
            self._ctx = replace(ctx, attention=attention, hidden=None, memo={}, kept={})
        slots = [ctx.attention[layer].slot_mapping for layer in self._layers]
        self._steps.append(_Step(following, hidden, ctx.positions, slots))
        self._num_tokens += num_tokens

    def settle(self) -> None:
        """Keep all that waits."""
        if self._ctx is None:
            return
        steps, ctx = self._steps, self._ctx
        self.forget()
        last = torch.cat([step.hidden.last for step in steps])
        read = {layer: torch.cat([step.hidden.inputs_of[layer] for step in steps]) for layer in ctx.wanted}
        self._keep(torch.cat([step.following for step in steps]), HiddenStates(last, read), self._context(ctx, steps))

    def settle_before(self, step: SchedulerOutput) -> None:
        """Keep all before the step message is applied, if it gives away slots or lets others read them."""
        if step.freed_rows or step.new_requests or step.transfers is not None:
            self.settle()

    def forget(self) -> None:
        """The cache is another one."""
        self._steps, self._num_tokens, self._ctx = [], 0, None

    def _waits(self, following: torch.Tensor, ctx: ForwardContext) -> bool:
        """Drafts of a step may turn out wrong: the next step writes these slots again, and a pass over
        both would have them twice."""
        meta = ctx.attention[0]
        is_plain = meta.drafted is None and not meta.is_static and not ctx.inputs
        return self._may_wait and is_plain and following.device.type == "cpu" and len(following) <= MOST_OF_STEP

    def _context(self, ctx: ForwardContext, steps: Sequence[_Step]) -> ForwardContext:
        """Says where all of their tokens lie, and nothing else."""
        attention = list(ctx.attention)
        for number, layer in enumerate(self._layers):
            slots = torch.cat([step.slots[number] for step in steps])
            attention[layer] = replace(attention[layer], slot_mapping=slots)
        return replace(ctx, positions=torch.cat([step.positions for step in steps]), attention=attention)
