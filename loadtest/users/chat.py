"""A person who asks short questions and reads each streamed answer before the next."""

from __future__ import annotations

from locust import between, task

from loadtest import prompts
from loadtest.streaming import StreamingUser


class ChatUser(StreamingUser):
    """Short prompts, every one a new conversation."""

    kind = "chat"
    weight = 5
    wait_time = between(0.1, 1.0)

    @task
    def chat(self) -> None:
        """One question."""
        self.ask([{"role": "user", "content": prompts.question(self.random)}])
