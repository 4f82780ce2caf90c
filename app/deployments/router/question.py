"""Holds what an ingress asks the Router about one request."""

from __future__ import annotations

from typing import NamedTuple

from app.deployments.router.prompt_hasher import split_hashes
from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import RouteQuery


class Question(NamedTuple):
    """Asks where a request shall go. Many travel in one call, so it holds little: one bytes object of all hashes is
    cheaper to send than many."""

    model: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: bytes  # of the prompt's full blocks, one after the other
    session: str = ""
    adapter: str = ""
    num_hashed_tokens: int = 0
    excluded: tuple[str, ...] = ()  # replicas that it shall not go to
    claim: Claim | None = None  # None: it is served in any case

    @classmethod
    def of(cls, model: str, query: RouteQuery, excluded: tuple[str, ...] = (), claim: Claim | None = None) -> Question:
        """The question for a query."""
        hashes, counted = b"".join(query.block_hashes), claim
        if claim is not None:
            counted = claim._replace(num_choices=query.num_choices, num_prompts=query.num_prompts)
        own = query.num_prompt_tokens, query.max_tokens, hashes, query.session, query.adapter, query.num_hashed_tokens
        return cls(model, *own, excluded, counted)

    @property
    def query(self) -> RouteQuery:
        """The same as policies are told."""
        choices, prompts = (1, 1) if self.claim is None else (self.claim.num_choices, self.claim.num_prompts)
        return RouteQuery(
            self.num_prompt_tokens,
            self.max_tokens,
            split_hashes(self.block_hashes),
            self.session,
            self.adapter,
            choices,
            prompts,
            self.num_hashed_tokens,
        )
