"""Says how long the prompts of a step may take, so that who decodes or comes beside them waits little.

Of `max_step_s` the decodes of the step take their part, and prompts get the rest; where one ends with it, a quarter
more. But a step has a fixed part, however few its tokens: its launches, and weights that are read anew. Steps that are
short, as of rests of prompts, tell it. On a GPU prompts have at least as many tokens as bring their step to WORTH times
that part: where it is long, shorter ones would be hardly quicker, and many more. Once more prompts wait than
BACKLOG_STEPS steps compute, steps grow with what waits there, and at saturation are as long as the budget of tokens
allows. Where that part is small, as of captured steps, prompts are cut beside decodes (`step_rounds.py`). Where even
the fewest tokens take longer than `max_step_s` (a CPU), up to PAUSE_STEPS steps of decodes alone follow, so that the
average is near it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from app.engine.scheduler.step_rounds import PLANNED, StepRounds

ALONE_S = 0.2  # for a request beside which nobody decodes or waits: somebody may come
WHOLE = 1.25  # times as long its step may take where it is the last: what is left would cost another one
BACKLOG_STEPS = 10
MIN_TIMED_TOKENS = 128  # of prompts in a step, however long they take: fewer are no quicker where weights are read anew
MIN_ALONE_TOKENS = 512
PAUSE_STEPS = 2
SIGNIFICANT_BITS = 4  # of a number of tokens, so that steps have few sizes
WORTH = 1.5
MOST_WORTH = 2048  # tokens: more take a device longer than any host takes for launches
MOST_FIXED = 3  # times as long as a step shall take, however long a short one took
SHORT = 0.6  # times as many tokens as steps usually have, or fewer: a step that tells the fixed part
FULL = 0.85  # times as many, or more: one that tells what a token takes
LAST = 1.25  # times as many tokens as a step has time for, where a prompt ends with them
WEIGHT = 0.25  # of the last step in an average
DOUBTED = 0.002  # of the fixed part, with each other step: short ones may not come until all are shorter
FORGOTTEN = 0.01  # of the most tokens that steps usually have, with each step
CHEAP = 0.65  # of what a step's prompts take: a fixed part up to that is small


@dataclass(slots=True)
class PromptTime:
    """`max_step_s`: seconds that a step with prompts shall take; 0: as long as its tokens take."""

    max_step_s: float = 0.0
    grows: bool = False  # with what waits
    rounds: StepRounds = field(default_factory=StepRounds)
    _pause: int = field(default=0, init=False)  # steps of decodes alone that are still to follow
    _usual: float = field(default=0.0, init=False)  # tokens that a step has lately, unless more waits
    _fixed_s: float = field(default=0.0, init=False)  # what the prompts of a short step take; 0 until told
    _token_s: float = field(default=0.0, init=False)  # what a token of a full step takes; 0 until told

    def observe(self, num_tokens: int, num_decodes: int, took_s: float, decode_s: float) -> None:
        """A step of so many tokens of prompts, and rows that decode, took so long; `decode_s`: what a step of decodes
        alone takes, 0 until measured."""
        if num_tokens and num_decodes:
            self.note(num_tokens, took_s - decode_s)
        self.rounds.count(num_decodes, took_s > self.max_step_s)

    def note(self, num_tokens: int, prompts_s: float) -> None:
        """A step's `num_tokens` tokens of prompts took so long, beside its decodes."""
        if prompts_s <= 0:
            return
        is_long = num_tokens <= self.rounds.usual and prompts_s > self.max_step_s  # it was planned to be far shorter
        if num_tokens <= SHORT * self._usual or is_long:
            most_s = min(MOST_FIXED * self.max_step_s, 2.0 * self._fixed_s or math.inf)  # some steps are stalls
            self._fixed_s = _average(self._fixed_s, min(prompts_s, most_s))
        else:
            self._fixed_s *= 1 - DOUBTED
        if num_tokens >= FULL * self._usual:
            self._token_s = _average(self._token_s, prompts_s / num_tokens)

    def most_tokens(
        self,
        token_s: float,
        decode_s: float,
        backlog: int,
        is_alone: bool,
        room: int = 1 << 30,
        first: int = 0,
        num_decodes: int = 0,
    ) -> int | None:
        """Returns how many tokens of prompts the step has time for; None: any number.

        `token_s`: seconds that a token of a prompt takes, 0 until measured; `decode_s`: that the step's decodes take;
        `backlog`: tokens of prompts that run or wait; `is_alone`: they are one request's, and nobody decodes; `room`:
        tokens that the step's budget has left for prompts; `first`: those of the prompts under way, or of the next one;
        `num_decodes`: rows that decode.
        """
        if not self.max_step_s or not token_s:
            return None
        if is_alone:
            most = max(MIN_ALONE_TOKENS, int(max(self.max_step_s, ALONE_S) / token_s))
            return max(_rounded(most), backlog if backlog <= WHOLE * most else 0)
        if decode_s and self._pause:
            self._pause -= 1
            return 0
        tokens = (self.max_step_s - decode_s) / token_s
        if self.grows and num_decodes:
            full_s = self._token_s or token_s
            planned = self.rounds.tokens(num_decodes, (PLANNED * self.max_step_s - decode_s) / full_s, backlog, first)
            if planned >= MIN_TIMED_TOKENS and self._fixed_s <= CHEAP * planned * full_s:
                self._usual = max(self.rounds.usual, (1 - FORGOTTEN) * self._usual)
                return max(planned, _rounded(backlog // BACKLOG_STEPS))
        self.rounds.usual = 0
        if self.grows:
            tokens = max(tokens, min(MOST_WORTH, WORTH * self._fixed_s / (self._token_s or token_s)))
            self._usual = max(tokens, (1 - FORGOTTEN) * self._usual)
            tokens = max(tokens, backlog / BACKLOG_STEPS)
        self._pause = self._steps_to_pause(min(MIN_TIMED_TOKENS, backlog, room) - tokens, token_s, decode_s)
        most = _rounded(max(MIN_TIMED_TOKENS, int(tokens)))
        return first if most < first <= LAST * most else most

    def _steps_to_pause(self, tokens_over: float, token_s: float, decode_s: float) -> int:
        if tokens_over <= 0:
            return 0
        gained_s = self.max_step_s - decode_s  # by a step of decodes alone
        return min(PAUSE_STEPS, math.ceil(tokens_over * token_s / gained_s)) if gained_s > 0 else 1


def _average(average: float, sample: float) -> float:
    return average + WEIGHT * (sample - average) if average else sample


def _rounded(tokens: int) -> int:
    shift = max(0, tokens.bit_length() - SIGNIFICANT_BITS)
    return tokens >> shift << shift
