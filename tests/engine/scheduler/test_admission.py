"""The engine's door: limits, ranges, defaults; every refusal names its field."""

from __future__ import annotations

import time
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
        ("logprobs", 101),
        ("prompt_logprobs", 200),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}:") as caught:
        admit([1], **{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("word", [(), (5, 100)])
def test_bad_words_must_be_token_ids(word: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        admit([1], request={"bad_words_token_ids": (word,)})


def test_time_spent_before_the_engine_counts_and_a_fast_clock_does_not() -> None:
    assert admit([1], request={"arrival_time": time.time() - 2}).arrival == pytest.approx(time.monotonic() - 2, abs=0.5)
    assert admit([1], request={"arrival_time": time.time() + 60}).arrival == pytest.approx(time.monotonic(), abs=0.5)


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


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), -float("inf")])
def test_biases_are_finite(bias: float) -> None:
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias={5: bias})
