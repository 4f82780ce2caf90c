"""Says how long the prompts of a step may take, so that who decodes or comes beside them waits little.

Of `max_step_s` the decodes of the step take their part, and prompts get the rest. Times vary, and who decodes feels the
long ones: steps are planned so much shorter that IN_TIME of those that are as long as they may be take no longer. Short
steps cost throughput where weights are read anew for each: so on a GPU, once more prompts wait than BACKLOG_STEPS steps
of that length compute, steps grow with what waits, and at saturation are as long as the budget of tokens allows. Where
even the fewest tokens take longer than that (a CPU), up to PAUSE_STEPS steps of decodes alone follow, so that the
average is near it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ALONE_S = 0.2  # for a request beside which nobody decodes or waits: somebody may come
WHOLE = 1.25  # times as long its step may take where it is the last: what is left would cost another one
BACKLOG_STEPS = 10
MIN_TIMED_TOKENS = 128  # of prompts in a step, however long they take: fewer are no quicker where weights are read anew
MIN_ALONE_TOKENS = 512
PAUSE_STEPS = 2
SIGNIFICANT_BITS = 4  # of a number of tokens, so that steps have few sizes
IN_TIME = 0.98
TURN = 0.04  # how fast the margin follows
MOST_MARGIN = 1.5
FULL = 0.85  # of the time: as long as a step may be, but for the rounding of its tokens


@dataclass(slots=True)
class PromptTime:
    """`max_step_s`: seconds that a step with prompts shall take; 0: as long as its tokens take."""

    max_step_s: float = 0.0
    grows: bool = False  # with what waits
    _pause: int = field(default=0, init=False)  # steps of decodes alone that are still to follow
    _margin: float = field(default=1.0, init=False)  # on what a step is expected to take

    def note(self, expected_s: float, step_s: float) -> None:
        """A step of decodes and prompts took `step_s`; what its tokens have taken on average is `expected_s`."""
        if FULL < expected_s * self._margin / (self.max_step_s or math.inf) <= 1.0:
            turn = TURN * (IN_TIME if step_s > self.max_step_s else IN_TIME - 1.0)
            self._margin = min(MOST_MARGIN, max(1.0, self._margin + turn))

    def most_tokens(
        self, token_s: float, decode_s: float, backlog: int, is_alone: bool, room: int = 1 << 30
    ) -> int | None:
        """Returns how many tokens of prompts the step has time for; None: any number.

        `token_s`: seconds that a token of a prompt takes, 0 until measured; `decode_s`: that the step's decodes take;
        `backlog`: tokens of prompts that run or wait; `is_alone`: they are one request's, and nobody decodes; `room`:
        tokens that the step's budget has left for prompts.
        """
        if not self.max_step_s or not token_s:
            return None
        if is_alone:
            most = max(MIN_ALONE_TOKENS, int(max(self.max_step_s, ALONE_S) / token_s))
            return max(_rounded(most), backlog if backlog <= WHOLE * most else 0)
        if decode_s and self._pause:
            self._pause -= 1
            return 0
        tokens = (self.max_step_s / self._margin - decode_s) / token_s
        if self.grows:
            tokens = max(tokens, backlog / BACKLOG_STEPS)
        self._pause = self._steps_to_pause(min(MIN_TIMED_TOKENS, backlog, room) - tokens, token_s, decode_s)
        return _rounded(max(MIN_TIMED_TOKENS, int(tokens)))

    def _steps_to_pause(self, tokens_over: float, token_s: float, decode_s: float) -> int:
        if tokens_over <= 0:
            return 0
        gained_s = self.max_step_s - decode_s  # by a step of decodes alone
        return min(PAUSE_STEPS, math.ceil(tokens_over * token_s / gained_s)) if gained_s > 0 else 1


def _rounded(tokens: int) -> int:
    shift = max(0, tokens.bit_length() - SIGNIFICANT_BITS)
    return tokens >> shift << shift
