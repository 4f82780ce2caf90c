"""Arrivals that do not wait for answers: a Poisson process of `--rate` requests per second.

A closed loop (Schroeder, Wierman and Harchol-Balter, 2006) slows down with its server and so hides how long a queue
gets; an open loop does not. One user of this kind is the whole load: `locust -f loadtest/open_loop.py --users 1 --rate
8`.
"""

from __future__ import annotations

from gevent.pool import Group
from locust import task

from loadtest import prompts
from loadtest.streaming import Message, StreamingUser

# Share of each kind among the arrivals: as the weights of the closed loop's users.
KINDS = {"chat": 5, "shared-prefix": 2, "long-prompt": 1}


class OpenLoopUser(StreamingUser):
    """Starts requests at random times, however many are still running."""

    concurrency = 1 << 16  # connections of this user's client
    fixed_count = 1

    def on_start(self) -> None:
        """Begin without running requests."""
        self._requests = Group()

    def on_stop(self) -> None:
        """Let running requests end; Locust's --stop-timeout bounds the wait."""
        self._requests.join()

    def wait_time(self) -> float:
        """Seconds to the next arrival."""
        return self.random.expovariate(self.options.rate)

    @task
    def arrive(self) -> None:
        """One request begins."""
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        self._requests.spawn(self.ask, self._messages(kind), kind)

    def _messages(self, kind: str) -> list[Message]:
        rng, num_words = self.random, self.options.prompt_words
        if kind == "long-prompt":
            return [{"role": "user", "content": prompts.long_prompt(rng, num_words)}]
        asked: Message = {"role": "user", "content": prompts.question(rng)}
        if kind == "chat":
            return [asked]
        prefix = prompts.shared_prefix(rng.randrange(prompts.NUM_SHARED_PREFIXES), num_words)
        return [{"role": "system", "content": prefix}, asked]
