"""Says how long the plan of the next step can wait: who comes meanwhile is in it, and not only in the one after it.

While a step runs, the next one is planned and sent, or the device would wait for the host. Planned as soon as the step
before has begun, it leaves out everybody who comes until that one ends: they wait for two steps. So a plan waits until
shortly before the end that is expected, if no prompt has to be computed yet. What is expected is never more than the
last steps of the kind took; how shortly before is learned: of the steps whose plan has waited, LATE may be launched
when the one before is over. Behind one that is launched so late in any case, as the host launches no faster than the
device computes, nobody knows how far the device is, and no plan waits.
"""

from __future__ import annotations

from collections import deque

LEAST_MARGIN_S, MOST_MARGIN_S = 0.002, 0.02  # the least at first, too
LATE = 0.03
LEAST_WAIT_S = 0.0002  # a shorter one is mostly the waking up
MOVE_S = 0.0001  # of the margin, with a step that is late
REMEMBERED = 8  # steps of a kind


class PlanTime:
    """Told when steps are sent and when their outputs come, in seconds of one clock."""

    def __init__(self) -> None:
        self.margin_s = LEAST_MARGIN_S
        self._began_s = 0.0  # of the step that runs
        self._is_behind = False  # that step was launched when the one before it was over
        self._has_waited = False
        self._sent: deque[tuple[bool, bool]] = deque()  # is long, the plan has waited; of steps that are out
        self._took_s = {is_long: deque[float](maxlen=REMEMBERED) for is_long in (False, True)}

    def send(self, now: float, *, is_long: bool) -> None:
        """A step is sent; `is_long`: it has more than a token a row."""
        if not self._sent:
            self._began_s, self._is_behind = now, False
        self._sent.append((is_long, self._has_waited))
        self._has_waited = False

    def take(self, now: float, took_s: float, *, was_over: bool) -> None:
        """The output of the oldest step that is out has come; the device had it for `took_s`, and `was_over`: it was
        over before the next one was launched."""
        if not self._sent:
            return
        is_long, _ = self._sent.popleft()
        self._took_s[is_long].append(took_s)
        self._began_s, self._is_behind = now, was_over
        if self._sent and self._sent[0][1]:
            margin_s = self.margin_s + MOVE_S * (was_over - LATE)
            self.margin_s = min(max(margin_s, LEAST_MARGIN_S), MOST_MARGIN_S)

    def spare_s(self, now: float, takes_s: float) -> float:
        """Returns for how long the next plan can wait, 0 if not, where one step is out, which takes `takes_s`; 0: as
        nobody knows, or as prompts are left to plan for."""
        if not takes_s or not self._sent or self._is_behind:
            return 0.0
        least_s = min([takes_s, *self._took_s[self._sent[-1][0]]])
        spare_s = self._began_s + least_s - self.margin_s - now
        if spare_s < LEAST_WAIT_S:
            return 0.0
        self._has_waited = True
        return spare_s
