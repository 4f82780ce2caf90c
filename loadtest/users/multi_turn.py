"""Conversations: every question repeats all that was said before, which a prefix cache need not compute again."""

from __future__ import annotations

from locust import between, task

from loadtest import prompts
from loadtest.streaming import Message, StreamingUser


class MultiTurnUser(StreamingUser):
    """Asks `--turns` questions in one conversation, pausing between them as a reader does."""

    kind = "multi-turn"
    weight = 2
    wait_time = between(0.1, 1.0)

    def on_start(self) -> None:
        """Begin with an empty conversation."""
        self._messages: list[Message] = []

    @task
    def turn(self) -> None:
        """The next question; a new conversation after the last one, or after an answer that failed."""
        if len(self._messages) >= 2 * self.options.turns:
            self._messages = []
        self._messages.append({"role": "user", "content": prompts.question(self.random)})
        answer = self.ask(self._messages)
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages = []
