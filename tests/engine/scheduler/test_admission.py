"""The engine's entry: limits, ranges, defaults; every refusal names its field."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import pytest

from app.engine.kv_cache.kv_cache_manager import KVCacheManager
from app.engine.request import EngineRequest, Request
from app.engine.sampling_params import SamplingParams
from app.engine.scheduler.admission import Admission
from app.errors import InvalidRequestError, PromptTooLongError


def admit(
    prompt: Any, *, num_blocks: int = 16, max_model_len: int = 50, request: dict[str, Any] | None = None, **params: Any
) -> Request:
    kv = KVCacheManager(num_blocks, 4, hash_key=b"key")
    admission = Admission(
        kv, model="m", vocab_size=100, eos_token_ids=(2,), max_model_len=max_model_len, block_hash_key=b"key"
    )
    return admission.admit(EngineRequest("r", prompt, SamplingParams(**params), **(request or {})))


def test_a_good_request_is_filled_in() -> None:
    request = admit([1, 2, 3, 4, 5])
    assert request.sampling_params.max_tokens == 45
    assert request.max_total_tokens == 50
    assert request.sampling_params.seed is not None
    assert len(request.block_hashes) == 1
    assert admit([1]).sampling_params.seed != admit([1]).sampling_params.seed


def test_what_the_client_set_stays() -> None:
    request = admit([1], seed=5, max_tokens=7)
    assert (request.sampling_params.seed, request.sampling_params.max_tokens) == (5, 7)


def test_the_smaller_of_context_and_cache_is_the_limit() -> None:
    assert admit([1], num_blocks=4).max_total_tokens == 16
    with pytest.raises(PromptTooLongError, match=r"20 tokens.*the KV cache holds 16"):
        admit([1] * 20, num_blocks=4)
    with pytest.raises(PromptTooLongError, match=r"60 tokens.*the model's context holds 50"):
        admit([1] * 60, num_blocks=100)


def test_prompt_and_max_tokens_together_must_fit() -> None:
    assert admit([1] * 10, max_tokens=40).max_total_tokens == 50
    with pytest.raises(PromptTooLongError, match=r"10 tokens and max_tokens asks for 41 more.*holds 50") as caught:
        admit([1] * 10, max_tokens=41)
    assert caught.value.param == "max_tokens"
    with pytest.raises(PromptTooLongError, match="min_tokens asks for 45"):
        admit([1] * 10, min_tokens=45)


@pytest.mark.parametrize("prompt", [[], [100], [-1, 5], ["a"], [1.5], [[1], [2]], [True], [1 << 70]])
def test_bad_prompts_are_refused_by_name(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt:") as caught:
        admit(prompt)
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
        admit([1], **{"logprobs": 0, field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("word", [(), (5, 100)])
def test_bad_words_must_be_token_ids(word: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        admit([1], request={"bad_words_token_ids": (word,)})


def test_time_spent_before_the_engine_counts_and_a_fast_clock_does_not() -> None:
    early = admit([1], request={"arrival_time": time.time() - 200})
    assert early.arrival == pytest.approx(time.monotonic() - 200, abs=100)
    assert admit([1], request={"arrival_time": time.time() + 600}).arrival == pytest.approx(time.monotonic(), abs=100)


def test_cache_roots_part_the_hash_chains() -> None:
    one, other = (admit([1] * 9, request={"cache_root": root}) for root in (b"a", b"b"))
    assert not set(one.block_hashes) & set(other.block_hashes)


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 3, "allowed_token_ids": [2]},
        {"min_tokens": 3, "allowed_token_ids": [2, 9], "stop_token_ids": [9]},
    ],
)
def test_a_request_that_could_choose_no_token_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        admit([1], **params)
    assert caught.value.param == "allowed_token_ids"
    admit([1], **{**params, "min_tokens": 0})


def test_bad_words_may_not_forbid_all_that_is_allowed() -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        admit([1], allowed_token_ids=[7], request={"bad_words_token_ids": ((7,),)})
    admit([1], allowed_token_ids=[7], request={"bad_words_token_ids": ((7, 8),)})


def test_allowed_ids_count_once() -> None:
    assert admit([1], allowed_token_ids=[5, 4, 5] * 1000).sampling_params.allowed_token_ids == (5, 4)


def test_bad_words_longer_than_any_output_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="51 tokens; from 1 to 50 fit") as caught:
        admit([1], request={"bad_words_token_ids": ((7,) * 51,)})
    assert caught.value.param == "bad_words"
    many = tuple((token, *((7,) * 49)) for token in range(100)) * 4
    with pytest.raises(InvalidRequestError, match="20000 tokens in all; at most 16384") as caught:
        admit([1], request={"bad_words_token_ids": many})
    assert caught.value.param == "bad_words"
    admit([1], request={"bad_words_token_ids": many[:300]})


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
            admit([1], max_tokens=20, request={"bad_words_token_ids": tuple(words)}, **params)
    assert num_stuck > 40
    pairs = tuple((token, token) for token in range(3, 13))
    admit([1], allowed_token_ids=range(3, 13), request={"bad_words_token_ids": pairs})  # no digit twice
    with pytest.raises(InvalidRequestError, match="allowed_token_ids"):
        admit([1], allowed_token_ids=[40], request={"bad_words_token_ids": ((40, 40),)})


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), -float("inf")])
def test_biases_are_finite(bias: float) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={5: bias})
