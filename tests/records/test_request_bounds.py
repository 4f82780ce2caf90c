"""Limits, ranges, defaults of a request; every refusal names its field."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import pytest

from app.errors import InvalidRequestError, PromptTooLongError, UnsupportedError
from app.records.bad_words import BadWords
from app.records.pooling_info import PoolingInfo
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.request_bounds import RequestBounds
from app.records.sampling_params import SamplingParams

BOUNDS = RequestBounds(100, (2,), 50, 64)


def settled(prompt: Any, *, bad_words: Any = (), **params: Any) -> SamplingParams:
    request = EngineRequest("r", prompt, SamplingParams(**params), asks=(BadWords(bad_words),))
    return BOUNDS.settle(request).sampling


def test_what_the_client_set_stays() -> None:
    params = settled([1], seed=5, max_tokens=7)
    assert (params.seed, params.max_tokens) == (5, 7)


def test_prompt_and_max_tokens_together_must_fit() -> None:
    assert settled([1] * 10, max_tokens=40).max_tokens == 40
    with pytest.raises(
        PromptTooLongError, match=r"max_tokens: .* 50 tokens.* needs 51: 10 in the prompt and 41 of"
    ) as caught:
        settled([1] * 10, max_tokens=41)
    assert caught.value.param == "max_tokens"
    with pytest.raises(PromptTooLongError, match=r"min_tokens: .* needs 55: 10 in the prompt and 45 of"):
        settled([1] * 10, min_tokens=45)


@pytest.mark.parametrize("prompt", [[], [100], [-1, 5], ["a"], [1.5], [[1], [2]], [True], [1 << 70]])
def test_bad_prompts_are_refused_by_name(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt:") as caught:
        settled(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", (100,)),
        ("allowed_token_ids", (-1, 4)),
        ("logit_bias", {100: 1.0}),
        ("logprob_token_ids", (5, 100)),
        ("logprobs", 101),
        ("prompt_logprobs", 200),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}:") as caught:
        settled([1], **{"logprobs": 0, field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("word", [(), (5, 100)])
def test_bad_words_must_be_token_ids(word: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        settled([1], bad_words=(word,))


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "allowed_token_ids": [2]},
        {"min_tokens": 3, "allowed_token_ids": [2, 9], "stop_token_ids": [9]},
    ],
)
def test_a_request_that_could_choose_no_token_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        settled([1], **params)
    assert caught.value.param == "allowed_token_ids"
    settled([1], **{**params, "min_tokens": 0})


def test_bad_words_may_not_forbid_all_that_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        settled([1], allowed_token_ids=[7], bad_words=((7,),))
    settled([1], allowed_token_ids=[7], bad_words=((7, 8),))


def test_allowed_ids_count_once() -> None:
    assert settled([1], allowed_token_ids=[5, 4, 5] * 1000).allowed_token_ids == (5, 4)


def test_bad_words_longer_than_any_output_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="51 tokens; from 1 to 50 fit") as caught:
        settled([1], bad_words=((7,) * 51,))
    assert caught.value.param == "bad_words"
    many = tuple((token, *((7,) * 49)) for token in range(100)) * 4
    with pytest.raises(InvalidRequestError, match="20000 tokens in all; at most 16384") as caught:
        settled([1], bad_words=many)
    assert caught.value.param == "bad_words"
    settled([1], bad_words=many[:300])


def gets_stuck(allowed: set[int], words: list[tuple[int, ...]], eos: set[int], min_tokens: int, depth: int) -> bool:
    """Whether some output leaves nothing to choose from: by trying all of up to `depth` tokens."""
    outputs: list[tuple[int, ...]] = [()]
    for length in range(depth):
        longer = []
        for output in outputs:
            free = [t for t in allowed if not any((*output, t)[-len(word) :] == word for word in words)]
            free = [t for t in free if length >= min_tokens or t not in eos]
            if not free:
                return True
            longer += [(*output, token) for token in free if token not in eos]
        outputs = longer
    return False


def test_no_output_leaves_nothing_to_choose_from() -> None:
    """Whatever can get stuck is refused; what only looks like it is not."""
    rng = random.Random(0)
    num_stuck = 0
    for _ in range(400):
        allowed = set(rng.sample([2, 5, 6, 7], rng.randint(1, 3)))  # 2 ends the output
        words = [tuple(rng.choices([5, 6, 7, 8], k=rng.randint(1, 3))) for _ in range(rng.randint(1, 6))]
        params = {"allowed_token_ids": tuple(allowed), "min_tokens": rng.choice([0, 1, 2])}
        is_stuck = gets_stuck(allowed, words, {2}, params["min_tokens"], 6)
        num_stuck += is_stuck
        with (
            pytest.raises(InvalidRequestError, match="allowed_token_ids") if is_stuck else suppress(InvalidRequestError)
        ):
            settled([1], max_tokens=20, bad_words=tuple(words), **params)
    assert num_stuck > 40
    pairs = tuple((token, token) for token in range(3, 13))
    settled([1], allowed_token_ids=range(3, 13), bad_words=pairs)  # no digit twice
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        settled([1], allowed_token_ids=[40], bad_words=((40, 40),))


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), -float("inf")])
def test_biases_are_finite(bias: float) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={5: bias})


def test_what_is_left_open_is_filled_in() -> None:
    assert settled([1] * 5).max_tokens == 45
    assert settled([1]).seed != settled([1]).seed
    asked = EngineRequest("r", [1] * 5, SamplingParams(min_tokens=9))
    assert BOUNDS.settle(asked, 20).max_tokens == 20
    assert BOUNDS.settle(asked, 5).max_tokens == 9, "min_tokens are asked for"


def test_what_is_settled_comes_back_as_it_is() -> None:
    """The engine looks again at what the builder made: nothing may change on the way."""
    once = BOUNDS.settle(EngineRequest("r", [1] * 5, SamplingParams()))
    assert BOUNDS.settle(once) is once
    assert replace(BOUNDS).settle(once) is once, "in another process"
    assert BOUNDS.settle(replace(once, settled_by=b"")).sampling == once.sampling


@pytest.mark.parametrize(
    "tighter",
    [{"vocab_size": 9}, {"max_model_len": 12}, {"max_kv_tokens": 12}, {"max_kv_tokens": 12, "max_model_len": 99}],
)
def test_other_bounds_look_again(tighter: dict[str, int]) -> None:
    """As an engine's do, whose cache is smaller than who settled the request knew."""
    once = BOUNDS.settle(EngineRequest("r", [9] * 5, SamplingParams(max_tokens=20)))
    with pytest.raises(InvalidRequestError):
        replace(BOUNDS, **tighter).settle(once)  # type: ignore[arg-type]


def test_no_bound_is_left_out_of_the_mark() -> None:
    for field in fields(RequestBounds):
        value = getattr(BOUNDS, field.name)
        other = (7, 8) if isinstance(value, tuple) else value + 1 if isinstance(value, int) else object()
        changed = replace(BOUNDS, **{field.name: other})
        assert changed.mark != BOUNDS.mark, field.name


def test_what_another_replica_generated_is_looked_at_again() -> None:
    once = BOUNDS.settle(EngineRequest("r", [1] * 5, SamplingParams(max_tokens=20)))
    assert BOUNDS.settle(replace(once, output_token_ids=[99])).output_token_ids == [99]
    for bad in ([100], [-1], [5] * 20):
        with pytest.raises(InvalidRequestError, match="output_token_ids"):
            BOUNDS.settle(replace(once, output_token_ids=bad))


def test_an_unknown_cache_does_not_bound() -> None:
    assert RequestBounds(100, (), 50).max_total_tokens == 50
    assert RequestBounds(100, (), 50, 40).max_total_tokens == 40


def test_the_kind_of_work_must_be_the_model_s() -> None:
    pooling = RequestBounds(100, (), 50, pooling=PoolingInfo("last", is_causal=True, tasks=("embed",)))
    embed = EngineRequest("r", [1] * 50, PoolingParams())
    settled = pooling.settle(embed)
    assert settled == embed
    assert pooling.settle(settled) is settled
    for bounds, work in ((BOUNDS, PoolingParams()), (pooling, SamplingParams())):
        with pytest.raises(UnsupportedError) as caught:
            bounds.settle(EngineRequest("r", [1], work))
        assert caught.value.param == "model"
    with pytest.raises(UnsupportedError) as caught:
        pooling.settle(EngineRequest("r", [1], PoolingParams(task="classify")))
    assert caught.value.param == "task"
    with pytest.raises(PromptTooLongError, match="holds 50 tokens, but the prompt has 51") as long:
        pooling.settle(EngineRequest("r", [1] * 51, PoolingParams()))
    assert long.value.param == "prompt"
