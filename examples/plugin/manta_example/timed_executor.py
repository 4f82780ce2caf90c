"""The worker in this process, with the time that steps took to be handed over."""

from __future__ import annotations

import time

from app.engine.executor.in_process import InProcessExecutor
from app.records.step import SchedulerOutput


class TimedExecutor(InProcessExecutor):
    """`submit_s` in seconds, in all."""

    submit_s = 0.0

    def submit(self, step_message: SchedulerOutput) -> None:
        """See Executor."""
        began = time.perf_counter()
        super().submit(step_message)
        self.submit_s += time.perf_counter() - began
