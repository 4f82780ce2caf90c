"""A step while it is being scheduled, and how its tokens are shared among prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.records.request_state import Request
from app.records.step import Int32Array

# Each of a step costs the host a tenth of a millisecond: with more of them a GPU would wait for the next step, and at
# the end the host for the GPU (512 texts of mixed lengths took 98 ms in three steps, and 77 in six of 91 each).
MOST_WHOLE_PROMPTS = 96


@dataclass(slots=True)
class TokenBudget:
    """Tokens left in the step that is being scheduled.

    While several requests wait to compute their prompts, those with much left to compute (more than
    `long_threshold`) share one half of what the decodes leave over, first come first served; so a short prompt behind
    a long one gets in at once, and a stream of short ones cannot starve a long one. What the short ones leave, the
    long ones get in the end. With `whole_prompts` (an encoder, whose tokens see those behind them), a prompt
    gets all of its tokens or has to wait for the next step, where it is the first; that takes MOST_WHOLE_PROMPTS.
    """

    left: int
    long_left: int = 0
    long_threshold: int = 0
    whole_prompts: bool = False
    spare: int = 0  # tokens left that prompts should not take, for the sake of others
    num_whole: int = 0  # prompts that the step takes so far, where they are whole

    def limit(self, most_tokens: int | None) -> None:
        """Leave at most so many tokens to prompts; None: any number. An encoder's prompts cannot be cut."""
        if most_tokens is not None and not self.whole_prompts:
            self.spare += max(0, self.left - most_tokens)
            self.left = min(self.left, most_tokens)

    def open_prefills(self, crowded: bool) -> None:
        """Fix the shares, once the decodes have taken theirs."""
        self.long_threshold = max(1, self.left // 4)
        self.long_left = (self.left + 1) // 2 if crowded else self.left

    def chunk(self, remaining: int) -> int:
        """Most tokens that a request with `remaining` tokens to compute gets; 0 = a shorter one may still get some."""
        if self.whole_prompts:
            return remaining if remaining <= self.left else 0
        most = self.left if remaining <= self.long_threshold else min(self.left, self.long_left)
        return min(remaining, most)

    @property
    def most(self) -> int:
        """Tokens that a chunk may have which cannot be cut."""
        return self.left + self.spare

    def spend(self, num_tokens: int, remaining: int) -> None:
        """Account a chunk of a request that had `remaining` tokens to compute."""
        self.spare -= max(0, num_tokens - self.left)
        self.left = max(0, self.left - num_tokens)
        if self.whole_prompts:
            self.num_whole += 1
            self.left = self.left if self.num_whole < MOST_WHOLE_PROMPTS else 0
        if remaining > self.long_threshold:
            self.long_left = max(0, self.long_left - num_tokens)


@dataclass(slots=True)
class StepPlan:
    """Holds what the step computes besides the decodes, so far."""

    budget: TokenBudget
    chunks: dict[Request, int] = field(default_factory=dict)  # request -> tokens
    drafts: Int32Array | None = None  # draft tokens of each decode; None: there are none
    num_proposed: int = 0  # that rows are to have after it
    preempted: bool = False
    has_decodes: bool = False

    @property
    def has_others(self) -> bool:
        """True if the step computes anything so far."""
        return self.has_decodes or bool(self.chunks)
