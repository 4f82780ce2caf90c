"""Learns how long a step may take before it counts as hung, from the steps that there were."""

from __future__ import annotations

from collections import deque

FLOOR_S = 5.0
TIMES_P99 = 10.0
WINDOW = 1000  # the last steps count
MIN_STEPS = 20  # fewer say nothing


class StepLimit:
    """Ten times the 99th percentile of the last steps, or of what a step of the largest size may take by the measured
    cost of a prefill token; at least FLOOR_S and at most `most_s`, which holds until there are measurements.

    One thread notes, any thread asks.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._durations: deque[float] = deque(maxlen=WINDOW)

    def note(self, seconds: float) -> None:
        """A step has taken so long."""
        self._durations.append(seconds)

    def limit_s(self, prefill_token_s: float, max_step_tokens: int) -> float:
        """The limit now; `prefill_token_s` is 0 where no prefill has been measured."""
        durations = sorted(self._durations.copy())
        if len(durations) < MIN_STEPS or not prefill_token_s:
            return self.most_s
        p99 = durations[min(len(durations) - 1, int(0.99 * len(durations)))]
        longest = max(p99, prefill_token_s * max_step_tokens)
        return min(self.most_s, max(FLOOR_S, TIMES_P99 * longest))
