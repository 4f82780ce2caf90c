"""How an ingress asks the Router. One that does not answer costs placement only: requests are placed without it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from app.deployments.channel.serve_port import call
from app.deployments.channel.wire import LoadReport
from app.deployments.routing.admission import Answer
from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import RouteQuery
from app.deployments.routing.prompt_hasher import PromptHasher
from app.engine.request import EngineRequest

REST_S = 1.0  # one that did not answer is not asked again for so long

logger = logging.getLogger("manta.ingress")


class RouterClient:
    """`handle` is Serve's, of `Router.route`."""

    def __init__(self, handle: Any, hasher: PromptHasher, timeout_s: float) -> None:
        self._handle = handle
        self._hasher = hasher
        self._timeout_s = timeout_s
        self._asleep_until = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer when it was asked last, a moment ago."""
        return time.monotonic() < self._asleep_until

    async def place(
        self,
        model: str,
        request: EngineRequest,
        load: LoadReport | None,
        excluded: tuple[str, ...] = (),
        claim: Claim | None = None,
    ) -> Answer | None:
        """The Router's answer for a prompt, but for `excluded` replicas; None when it knows none or does not answer in
        time. `load`: any replica's. See Router.route."""
        if self.is_silent:
            return None
        known = [*request.prompt_token_ids, *request.output_token_ids] if request.output_token_ids else None
        hashes = await self._hasher.hash_prompt(known or request.prompt_token_ids, request.placement.cache_root, load)
        query = replace(RouteQuery.of_prompt(request), block_hashes=hashes)
        try:
            claimed = None if claim is None else claim._replace(num_choices=query.num_choices)
            answer: Answer | None = await call(
                self._handle, *route_arguments(model, query), excluded, claimed, timeout_s=self._timeout_s
            )
        except Exception as error:
            if not self.is_silent:  # the first of those that wait for it
                logger.info("the Router did not answer (%s); placing requests here", type(error).__name__)
            self._asleep_until = time.monotonic() + REST_S
            return None
        return answer


def route_arguments(model: str, query: RouteQuery) -> tuple[str, int, int, bytes, str, str]:
    """The arguments of Router.route: one bytes object of all hashes is cheaper to send than many."""
    hashes = b"".join(query.block_hashes)
    return (model, query.num_prompt_tokens, query.max_tokens, hashes, query.session, query.adapter)
