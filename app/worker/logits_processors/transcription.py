"""The rules of a transcript (Radford et al., 2022): tokens that never come, and times around texts, which only grow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.records.step import NewRequest
from app.records.transcription_rules import TimeRules, TranscriptionRules
from app.worker.logits_processors.base import LogitsProcessor, SamplingStep

_ANY = 1 << 30  # no token is behind it


@dataclass(slots=True, frozen=True)
class _State:
    begin: int  # absolute position of the transcript's first token
    suppressed: NDArray[np.int64]
    suppressed_first: NDArray[np.int64]
    times: TimeRules | None


class Transcription(LogitsProcessor):
    """Reads the transcript so far from the device's token history."""

    reads = frozenset({TranscriptionRules})

    def read(self, request: NewRequest) -> _State | None:
        """Returns the rules, and where the transcript begins."""
        rules = request.spec.asked(TranscriptionRules)
        if rules is None:
            return None
        never = () if rules.times is None else rules.times.never
        suppressed = self._ids((*rules.suppressed, *never))
        return _State(request.num_prompt_tokens, suppressed, self._ids(rules.suppressed_first), rules.times)

    def _ids(self, token_ids: tuple[int, ...]) -> NDArray[np.int64]:
        return np.array([token for token in token_ids if self.in_vocabulary(token)], np.int64)

    def build(self, indices: list[int], states: list[_State]) -> None:
        """Flat (row, token) of what never comes, the same with positions of what is no beginning; rules of times."""
        self._rows, tokens = self.flat(indices, [state.suppressed for state in states])
        self._tokens = self.long(tokens)
        self._first_rows, first_tokens = self.flat(indices, [state.suppressed_first for state in states])
        self._first_tokens = self.long(first_tokens)
        counts = [len(state.suppressed_first) for state in states]
        self._first_at = self.long(np.repeat([state.begin for state in states], counts))
        timed = [(i, state.begin, state.times) for i, state in zip(indices, states, strict=True) if state.times]
        self._timed = bool(timed)
        if timed:
            numbers = [
                (i, begin, times.first, times.end, _ANY if times.latest_begin is None else times.latest_begin)
                for i, begin, times in timed
            ]
            columns = self.long(np.array(numbers, np.int64).T)
            self._timed_rows, self._begin, self._zero, self._end, self._latest = columns.unbind(0)

    def apply(self, logits: torch.Tensor, step: SamplingStep) -> None:
        """-inf for all that the rules forbid."""
        hidden = torch.full((), -math.inf, device=self.device)
        logits.index_put_((self._rows, self._tokens), hidden)
        is_first = step.device_lengths[self._first_rows] == self._first_at
        penalty = torch.zeros(is_first.shape, device=self.device).masked_fill_(is_first, -math.inf)
        logits.index_put_((self._first_rows, self._first_tokens), penalty, accumulate=True)
        if self._timed:
            logits[self._timed_rows] = self._with_times(logits[self._timed_rows], step)

    def _with_times(self, logits: torch.Tensor, step: SamplingStep) -> torch.Tensor:
        """Logits [n, V] of the rows with times, as those allow."""
        lengths = step.device_lengths[self._timed_rows]
        said = step.token_ids.index_select(0, step.rows[self._timed_rows])  # [n, W]
        places = torch.arange(said.shape[1], device=said.device)
        is_own = (places >= self._begin[:, None]) & (places < lengths[:, None])
        is_time = is_own & (said >= self._zero[:, None])
        count = lengths - self._begin
        last, before = (is_time.gather(1, (lengths - back).clamp(min=0)[:, None])[:, 0] for back in (1, 2))
        before = before | (count < 2)
        newest = torch.where(is_time, places, -1).amax(1)
        time = said.gather(1, newest.clamp(min=0)[:, None])[:, 0] + (~last | before)
        least = torch.where(newest >= 0, time.long(), self._zero)[:, None]
        ids = torch.arange(logits.shape[1], device=logits.device)
        times = ids >= self._zero[:, None]
        forbidden = times & ((last & before)[:, None] | (ids < least))  # two times in a row end a piece, and times grow
        forbidden |= (ids < self._end[:, None]) & (last & ~before)[:, None]  # a text has its second time
        forbidden |= (count == 0)[:, None] & (~times | (ids > self._latest[:, None]))  # a time begins
        kept = logits.masked_fill(forbidden, -math.inf)
        # All times together are more likely than the most likely text: a time it is.
        of_times = kept.masked_fill(~times, -math.inf).logsumexp(1)
        of_text = kept.masked_fill(times, -math.inf).amax(1)
        return kept.masked_fill(~times & (of_times > of_text)[:, None], -math.inf)
