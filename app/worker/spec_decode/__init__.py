"""Speculative decoding: what proposes draft tokens, a file and a line of `PROPOSERS` each; what keeps the right ones.

A draft is kept when it is the token that the request would have got anyway, sampled with its own random numbers (I6).
So any proposer, and none, give the same tokens (drafter-invariant speculative decoding, Daliri et al. 2024).
"""

from __future__ import annotations

from app.backends import PROPOSERS
from app.worker.spec_decode.base import Proposer, ProposerContext


def create_proposer(context: ProposerContext) -> Proposer | None:
    """The one that this engine is asked for, on all of its ranks; None: it decodes token by token."""
    wanted = context.config.speculative_config
    if wanted is None:
        return None
    kind: type[Proposer] = PROPOSERS.load(wanted.method)
    return kind.create(context)
