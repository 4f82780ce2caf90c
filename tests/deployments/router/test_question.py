"""What the Router is asked is what the ingress wanted to know."""

from __future__ import annotations

from app.deployments.router.question import Question
from app.deployments.routing.claim import Claim
from app.deployments.routing.policies.base import RouteQuery

HASHES = (b"a" * 16, b"b" * 16)


def test_a_query_comes_as_it_was() -> None:
    query = RouteQuery(70, 20, HASHES, "session", "adapter", num_choices=2, num_prompts=3, num_hashed_tokens=40)
    question = Question.of("m", query, ("x",), Claim(tenant="t"))
    assert question.query == query
    assert (question.model, question.excluded) == ("m", ("x",))
    assert question.claim == Claim(tenant="t", num_choices=2, num_prompts=3)


def test_without_a_claim_it_is_one_request() -> None:
    query = RouteQuery(70, 20, num_prompts=3)
    assert Question.of("m", query).query == RouteQuery(70, 20)
