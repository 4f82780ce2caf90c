"""Speculative decoding: what proposes draft tokens, a file and a line of `PROPOSERS` each; what keeps the right ones.

A draft is kept when it is the token that the request would have got anyway, sampled with its own random numbers (I6).
So any proposer, and none, give the same tokens (drafter-invariant speculative decoding, Daliri et al. 2024).
"""

from __future__ import annotations

from app.backends import PROPOSERS
from app.worker.spec_decode.base import Proposer, ProposerContext


def create_proposer(context: ProposerContext) -> Proposer | None:
    """The one of the table that this engine is to have; None: it decodes token by token. Each makes its proposer, or
    gives None where this engine is not to have it; then all of its ranks are not."""
    made: list[Proposer | None] = [PROPOSERS.load(name)(context) for name in PROPOSERS]
    proposers = [proposer for proposer in made if proposer is not None]
    assert len(proposers) <= 1, "two proposers for one engine"
    return proposers[0] if proposers else None
