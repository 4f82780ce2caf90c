"""Users that paste a long text that nobody sent before: all of it has to be prefilled."""

from __future__ import annotations

from locust import between, task

from loadtest import prompts
from loadtest.streaming import StreamingUser


class LongPromptUser(StreamingUser):
    """A long text and a question about it."""

    kind = "long-prompt"
    weight = 1
    wait_time = between(0.5, 2.0)

    @task
    def chat(self) -> None:
        """One text."""
        self.ask([{"role": "user", "content": prompts.long_prompt(self.random, self.options.prompt_words)}])
