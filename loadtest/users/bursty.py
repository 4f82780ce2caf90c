"""Silence, then many requests at once: what queues, admission and the fairness of the scheduler are for."""

from __future__ import annotations

from gevent.pool import Group
from locust import between, task

from loadtest import prompts
from loadtest.streaming import StreamingUser


class BurstyUser(StreamingUser):
    """Sends `--burst` short questions at the same moment, waits for all answers, is silent for some seconds."""

    kind = "bursty"
    weight = 1
    wait_time = between(3.0, 8.0)
    concurrency = 1024  # connections of this user's client

    @task
    def burst(self) -> None:
        """One burst; ended early, it takes its requests along."""
        requests = Group()
        try:
            for _ in range(self.options.burst):
                requests.spawn(self.ask, [{"role": "user", "content": prompts.question(self.random)}])
            requests.join()
        finally:
            requests.kill(block=False)
