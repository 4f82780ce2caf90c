"""`min_tokens`: the tokens that would end the answer are impossible until it is long enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.records.step import NewRequest
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep


@dataclass(slots=True, frozen=True)
class _State:
    until: int  # absolute position from which ending is allowed
    stop_ids: NDArray[np.int64]


class MinTokens(LogitsProcessor):
    """Scatters -inf over end-of-sequence and stop token ids while the output is too short."""

    reads = frozenset({"min_tokens"})

    def read(self, request: NewRequest) -> _State | None:
        """Returns where ending becomes possible, and what it would end with."""
        params = request.spec.sampling
        stop_ids = {*request.eos_token_ids, *params.stop_token_ids}
        usable = sorted(token for token in stop_ids if self.in_vocabulary(token))
        if params.min_tokens == 0 or not usable:
            return None
        return _State(request.num_prompt_tokens + params.min_tokens, np.array(usable, np.int64))

    def build(self, indices: list[int], states: list[_State]) -> None:
        """Flat (row, token, position from which it is allowed)."""
        self._rows, tokens = self.flat(indices, [state.stop_ids for state in states])
        self._tokens = self.long(tokens)
        self._until = self.long(np.repeat([state.until for state in states], [len(state.stop_ids) for state in states]))
        self._users, self._user_until = indices, [state.until for state in states]

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf where the output has fewer than min_tokens tokens. The host knows the least lengths, so it can skip."""
        if (step.lengths[self._users] - step.slack >= self._user_until).all():
            return
        early = step.device_lengths[self._rows] < self._until
        penalty = torch.zeros(early.shape, device=self.device).masked_fill_(early, -math.inf)
        logits.index_put_((self._rows, self._tokens), penalty, accumulate=True)
