"""Asks the Router for an ingress. A Router that does not answer costs placement only: requests are placed without
it.

Late is not gone: one late call goes on beside the requests that are placed without it. Its answer ends the Router's
rest, and its time raises the limit for the next, so that a busy machine has a slower Router, not none.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from app.deployments.channel.own_context import start_outside
from app.deployments.ingress.answer_limit import AnswerLimit
from app.deployments.ingress.router_calls import RouterCalls
from app.deployments.router.admission import Answer
from app.deployments.router.prompt_hasher import PromptHasher
from app.deployments.router.question import Question
from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import RouteQuery
from app.records.bundle import Bundle
from app.records.load_report import LoadReport
from app.records.request import EngineRequest

REST_S = 1.0  # one that did not answer is not asked again for so long, unless its answer comes late

logger = logging.getLogger("manta.ingress")


class RouterClient:
    """`handle` is Serve's, of `Router.route`; `timeout_s`: the least that it gets for an answer."""

    def __init__(self, handle: Any, hasher: PromptHasher, timeout_s: float) -> None:
        self._calls = RouterCalls(handle)
        self._hasher = hasher
        self._limit = AnswerLimit(timeout_s)
        self._asleep_until = 0.0
        self._late: asyncio.Task[None] | None = None  # waits for the answer of one that was late

    @property
    def is_silent(self) -> bool:
        """True if it did not answer when it was asked last, a moment ago."""
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
        tokens, root = known or request.prompt_token_ids, request.cache_root
        if (bundle := request.asked(Bundle)) is not None:  # its prompts begin alike, if anything of them is cached
            tokens = tokens[: bundle.lengths[0]]
        hashes = await self._hasher.hash_prompt(tokens, root, load, request.asks)
        query = replace(RouteQuery.of_prompt(request), block_hashes=hashes, num_hashed_tokens=len(tokens))
        return await self._ask(Question.of(model, query, excluded, claim))

    async def _ask(self, question: Question) -> Answer | None:
        began_s = time.monotonic()
        asked = self._calls.ask(question)
        is_heard_late = False
        try:
            if await self._limit.wait(asked.answer):
                answer = asked.answer.result()
                self._limit.learn(time.monotonic() - began_s)
                return answer
            self._rest(f"nothing within {self._limit.seconds:.2f} s")
            self._calls.pass_over(asked)
            is_heard_late = self._late is None
            if is_heard_late:
                self._late = start_outside(self._hear_late(asked.answer, began_s))
        except Exception as error:
            self._rest(type(error).__name__)
        finally:
            if not is_heard_late:
                asked.answer.cancel()
        return None

    def _rest(self, why: str) -> None:
        if not self.is_silent:  # the first of those that wait for it
            logger.info("the Router did not answer (%s); placing requests here", why)
        self._asleep_until = time.monotonic() + REST_S

    async def _hear_late(self, asked: asyncio.Future[Answer | None], began_s: float) -> None:
        """Ask again as soon as a late answer comes, and give the next as much time."""
        try:
            await asyncio.wait({asked}, timeout=REST_S)
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                took_s = time.monotonic() - began_s
                self._limit.learn(took_s)
                self._asleep_until = 0.0
                logger.info("the Router answered after %.2f s; it gets %.2f s from now on", took_s, self._limit.seconds)
        finally:
            asked.cancel()
            self._late = None
