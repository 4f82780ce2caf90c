"""Users of a few applications, each with one long system prompt: what prefix caching and routing by it are for."""

from __future__ import annotations

from locust import between, task

from loadtest import prompts
from loadtest.streaming import StreamingUser


class SharedPrefixUser(StreamingUser):
    """One of four long system prompts, then a short question."""

    kind = "shared-prefix"
    weight = 2
    wait_time = between(0.1, 1.0)

    @task
    def chat(self) -> None:
        """One question to one of the applications."""
        prefix = prompts.shared_prefix(self.random.randrange(prompts.NUM_SHARED_PREFIXES), self.options.prompt_words)
        self.ask([{"role": "system", "content": prefix}, {"role": "user", "content": prompts.question(self.random)}])
