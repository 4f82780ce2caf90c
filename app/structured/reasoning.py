"""Finds where a model's reasoning lies before a structured output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ReasoningSpan:
    """The structured output begins after the tokens `end_token_ids`.

    `start_token_id`: nothing is open yet. The model may begin with this token, and reasons then, or begin with the
    structured output at once. None: the prompt has opened the reasoning.
    """

    end_token_ids: tuple[int, ...]
    start_token_id: int | None = None
