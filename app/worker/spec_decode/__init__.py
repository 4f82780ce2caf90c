"""Speculative decoding: what proposes draft tokens, one file and one line each; what keeps those that are right.

A draft is kept when it is the token that the request would have got anyway, sampled with its own random numbers (I6).
So any proposer, and none, give the same tokens (drafter-invariant speculative decoding, Daliri et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs no torch
    from app.engine.spec_decode.base import Proposer, ProposerContext

# Each makes its proposer, or gives None where this engine is not to have it; then all of its ranks are not.
PROPOSERS: Registry[Callable[[ProposerContext], Proposer | None]] = Registry("proposer", {})


def create_proposer(context: ProposerContext) -> Proposer | None:
    """The one of the table that this engine is to have; None: it decodes token by token."""
    made = [PROPOSERS.load(name)(context) for name in PROPOSERS]
    proposers = [proposer for proposer in made if proposer is not None]
    assert len(proposers) <= 1, "two proposers for one engine"
    return proposers[0] if proposers else None
