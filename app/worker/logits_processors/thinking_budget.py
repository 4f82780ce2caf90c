"""`thinking_token_budget`: once reasoning has had its tokens, only its closing marker is possible.

Whether the reasoning is still open is read from the device's token history (I2). The host knows from the lengths alone
when to ask, so that the row costs nothing before its budget is spent, and nothing after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from app.records.step import NewRequest
from app.records.thinking_budget import ThinkingBudget as Budget
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep

# Tokens (white space) that may stand before the opening marker: the budget may end so many tokens early, or be asked
# about for so long.
SLACK = 8


@dataclass(slots=True, frozen=True)
class _State:
    num_prompt_tokens: int
    first: int  # absolute position from which open reasoning is closed
    last: int  # the first position at which nobody asks any more
    opening: torch.Tensor | None  # int32 [n]; None: the prompt has opened the reasoning
    closing: torch.Tensor  # int32 [k]


class ThinkingBudget(LogitsProcessor):
    """Writes the closing marker, token by token, into rows that think too long."""

    reads = frozenset({Budget})

    def read(self, request: NewRequest) -> _State | None:
        """Returns where the budget ends, and the markers."""
        budget = request.spec.asked(Budget)
        if budget is None or not budget.closing or not all(map(self.in_vocabulary, budget.closing)):
            return None
        first = request.num_prompt_tokens + len(budget.opening) + budget.num_tokens
        opening = self._ids(budget.opening) if budget.opening else None
        last = first + len(budget.closing) + SLACK
        return _State(request.num_prompt_tokens, first, last, opening, self._ids(budget.closing))

    def build(self, indices: list[int], states: list[_State]) -> None:
        """Remember the rows that use it."""
        self._users = list(zip(indices, states, strict=True))

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """Close the open reasoning among the rows that have come to the end of their budget."""
        for index, state in self._users:
            length = int(step.lengths[index])
            if state.first <= length < state.last:
                row = step.token_ids.index_select(0, step.rows[index : index + 1])[0]
                _close(logits[index], row[state.num_prompt_tokens : length], state)

    def _ids(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        return self.long(list(token_ids)).to(torch.int32)


def _close(logits: torch.Tensor, output: torch.Tensor, state: _State) -> None:
    """Leave the next token of the closing marker alone possible, unless `output` [n] has no open reasoning.

    `logits` are fp32 [V], edited in place. Nothing is read back to the host.
    """
    is_closed = _contains(output, state.closing)
    if state.opening is not None:
        is_closed = is_closed | ~_contains(output, state.opening)
    token = state.closing[:1]
    for count in range(1, len(state.closing)):
        if count <= len(output):  # the first `count` tokens of the marker are there
            begun = (output[-count:] == state.closing[:count]).all()
            token = torch.where(begun, state.closing[count : count + 1], token)
    forced = torch.full_like(logits, -math.inf).index_fill_(0, token.long(), 0.0)
    logits.copy_(torch.where(is_closed, logits, forced))


def _contains(output: torch.Tensor, marker: torch.Tensor) -> torch.Tensor:
    """Tells whether `marker` [k] stands somewhere in `output` [n]: bool []."""
    if len(output) < len(marker):
        return torch.zeros((), dtype=torch.bool, device=output.device)
    return (output.unfold(0, len(marker), 1) == marker).all(1).any()
