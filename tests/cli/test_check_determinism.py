"""`manta check-determinism` against an exact engine, servers whose numbers move, and mistakes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.api.server.app import create_app
from app.cli.check_determinism import prompt_of
from app.config.limits import RequestLimits
from tests.api.conftest import Server
from tests.api.engine_in_this_process import EngineInThisProcess
from tests.cli.conftest import Manta


def test_an_exact_engine(manta: Manta) -> None:
    client = EngineInThisProcess(deterministic="batch", dtype="bfloat16")
    try:
        with Server(create_app(client, RequestLimits())) as server:
            done = manta("check-determinism", server.url, "--prompts", 3, "--others", 4, "--max-tokens", 4)
    finally:
        client.engine.shutdown()
    assert (done.code, done.err) == (0, "")
    head, columns, *rows = done.out.splitlines()
    assert head == f"tiny-chat at {server.url}: 3 prompts, 4 tokens each, against each of them alone"
    assert columns.split() == ["asked", "same", "differ", "first", "difference"]
    assert [row.split()[-2:] for row in rows] == [["3", "0"]] * 3


class Moving:
    """Answers two tokens, whose logprobs are those of `change` from its n-th answer on."""

    def __init__(self, change: dict[str, Any], after: int) -> None:
        self.change, self.after, self.count = change, after, itertools.count()
        self.salts: list[tuple[str, str]] = []  # with the prompt, as they came

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "moving"}]})

    async def complete(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.salts.append((body["prompt"], body["cache_salt"]))
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5}, {"b": -0.25}]}
        if next(self.count) >= self.after:
            logprobs |= self.change
        return JSONResponse({"choices": [{"text": "ab", "logprobs": logprobs}]})

    @property
    def app(self) -> Starlette:
        completions = Route("/v1/completions", self.complete, methods=["POST"])
        return Starlette(routes=[Route("/v1/models", self.models), completions])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": ["a", "c"]}, "prompt 0, token 1: 'b', then 'c'"),
        ({"token_logprobs": [-0.5, -0.25000003]}, "prompt 0, token 1 'b': -0.25, then -0.25000003"),
        ({"top_logprobs": [{"a": -0.5}, {"b": -0.25, "c": -9.0}]}, "prompt 0, token 1: logprobs of other tokens"),
        ({"tokens": ["a"]}, "prompt 0, 2 tokens, then 1"),
    ],
)
def test_the_last_digit_counts(change: dict[str, Any], says: str, manta: Manta) -> None:
    moving = Moving(change, after=4)  # two prompts alone, two cached
    with Server(moving.app) as server:
        done = manta("check-determinism", server.url, "--prompts", 2, "--others", 1)
    assert (done.code, done.err) == (1, "")
    rows = done.out.splitlines()[2:]
    assert rows[0].split() == ["alone,", "cached", "2", "0"]
    assert rows[1].startswith("among others")
    assert rows[1].endswith(f"0       2  {says}")
    alone, cached, *crowds = (salt for prompt, salt in moving.salts if prompt == prompt_of(0, 1))
    assert alone == cached  # what comes side by side comes in any order, but one crowd after the other
    assert crowds[0] != alone == crowds[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--prompts", 0), "--prompts: 0 is not within 1 and 1000"),
        (("--max-tokens", -1), "--max-tokens: -1 is not within 1 and 100000"),
        (("--others", 5000), "--others: 5000 is not within 0 and 1000"),
    ],
)
def test_mistakes(words: tuple[object, ...], says: str, manta: Manta) -> None:
    assert manta("check-determinism", "http://127.0.0.1:9", *words).mistake == says


def test_a_server_that_answers_otherwise(manta: Manta) -> None:
    assert "url 'nowhere'" in manta("check-determinism", "nowhere").mistake
    done = manta("check-determinism", "http://127.0.0.1:9")
    assert done.code == 1
    assert "no server answers at http://127.0.0.1:9" in done.err

    async def refuse(request: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": "the context is too short"}}, 400)

    async def without(request: Request) -> JSONResponse:
        return JSONResponse({"choices": [{"text": "ab", "logprobs": None}]})

    models = Route("/v1/models", Moving({}, 0).models)
    for answer, says in ((refuse, "HTTP 400 Bad Request: the context is too short"), (without, "without logprobs")):
        with Server(Starlette(routes=[models, Route("/v1/completions", answer, methods=["POST"])])) as server:
            done = manta("check-determinism", server.url)
        assert done.code == 1
        assert done.err.count("\n") == 1
        assert says in done.err


def test_prompts_are_unlike() -> None:
    prompts = [prompt_of(number, 30) for number in range(20)]
    assert len({prompt[:40] for prompt in prompts}) == 20
    assert prompt_of(3, 30) == prompts[3]
