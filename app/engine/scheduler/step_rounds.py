"""Says how many tokens of prompts a step has beside decodes, so that about one token in a hundred comes late.

Products take their rows in rounds: of an 8B model on an H200 768 rows or 1,024 take the least time a row, as all
multiprocessors are busy to the end. Steps have as many rounds as take PLANNED times the objective, since the same step
takes longer at times. As long as tokens that came in time make up for those that come late, they have a round more
while many prompts wait, or where few rows decode and a prompt ends with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.records.step_places import DECODE_PLACES, FEWEST_ROUNDS, ROUND, decode_places

PLANNED = 0.85
LATE = 0.01  # of the tokens: the 99th percentile is in time
MOST_LEFT = 100.0  # late tokens, by however many that came in time, and that others have to make up for
NEARLY = 0.2  # of a round, by which the number may be wrong: the same step takes longer at times
BUSY_STEPS = 3  # steps' worth of prompts
FEW = DECODE_PLACES[0]  # rows that decode: beside them a prompt that can end takes no second step
OVER = 1.02  # times as many rows as a round has take hardly longer


@dataclass(slots=True)
class StepRounds:
    """`left`: tokens that may still come late, by those that came in time before."""

    left: float = 0.0
    rounds: int = 0  # that steps have lately; 0: rounds were no measure
    usual: int = 0  # tokens of the last plan, were it not longer; 0: it was no plan by rounds

    def tokens(self, num_decodes: int, time_for: float, backlog: int, first: int) -> int:
        """Tokens beside so many rows that decode, 0 where rounds are no measure; `time_for`: those that take PLANNED
        times the objective; `backlog`: those that run or wait, `first`: of the prompt under way or the next one."""
        places = decode_places(num_decodes)
        rounds = (time_for + places) / ROUND
        most_rounds = int(rounds + NEARLY)
        self.rounds = max(int(rounds - NEARLY), min(self.rounds or most_rounds, most_rounds))
        if self.rounds < FEWEST_ROUNDS:  # much of the time would be left, as on a slower GPU
            self.rounds = self.usual = 0
            return 0
        self.usual = usual = self.rounds * ROUND - places
        most = usual + ROUND
        if self.left <= 0.0:
            return usual
        if num_decodes <= FEW and usual < first <= OVER * (most + places) - places:
            return first
        return most if backlog > BUSY_STEPS * usual else usual

    def count(self, num_tokens: int, is_late: bool) -> None:
        """Tokens came, of rows that decode."""
        self.left = min(MOST_LEFT, max(-MOST_LEFT, self.left + num_tokens * (LATE - is_late)))
