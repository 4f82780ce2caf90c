"""Tells how the answers to a prompt begin: what the template and the model's reasoning parser say beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from app.structured.reasoning import ReasoningSpan


@dataclass(slots=True, frozen=True)
class AnswerStart:
    """Holds what a builder of requests and an output processor have to know of it."""

    shown_token_ids: frozenset[int] = frozenset()  # special tokens that stay in the text
    reasoning: ReasoningSpan | None = None  # structured outputs begin after it
    inside: bool | None = None  # whether answers begin inside the reasoning; None: the prompt's end tells


PLAIN = AnswerStart()
