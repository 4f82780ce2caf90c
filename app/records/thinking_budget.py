"""Says how many tokens a request may think, and how the tokens of its reasoning are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ThinkingBudget:
    """At most `num_tokens` of reasoning, then the model is made to write `closing`.

    `opening` is what begins reasoning in the output; () where the prompt has begun it.
    """

    num_tokens: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]
