"""Requests that bring an encoder's input, through the whole engine: mixed lengths, chunks, prefix hits, preemption and
steps in flight give transformers' tokens; the same prompt behind another sound shares nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.engine.core import EngineCore
from app.errors import InvalidRequestError, UnsupportedError
from app.records.encoder_input import EncoderInput
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import assert_idle, run
from tests.engine.test_pictures import core_of
from tests.tiny_models import tiny_model
from tests.tiny_sounds import judged, noise, tiny_whisper

TOKENS = 7
ASKED: Sequence[tuple[int, list[int]]] = (  # seeds of sounds, prompts
    (1, [3, 17, 40]),
    (2, [3, 17, 40]),
    (1, [3]),
    (3, [9, 8, 7, 6, 5, 4, 11, 12, 13, 14, 3, 17, 40]),
    (1, [9, 8, 7, 6, 5, 4, 11, 12, 13, 14, 3, 17, 40]),
    (4, list(range(20, 50))),
)
MODES: dict[str, dict[str, Any]] = {
    "all at once": {"max_num_batched_tokens": 512},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "few blocks": {"num_blocks": 16, "max_num_batched_tokens": 24},
    "static steps, one in flight": {"static": True, "max_inflight_steps": 1},
    "two rows": {"max_num_seqs": 2},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "host tier": {"kv_host_memory_bytes": 1 << 18, "num_blocks": 24},
    "no prefix cache": {"enable_prefix_caching": False},
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
}


def whisper_core(**options: Any) -> EngineCore:
    return core_of(str(tiny_whisper()), **{"max_model_len": 64, **options})


def request(index: int, given: EncoderInput, prompt: list[int], **more: Any) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    return EngineRequest(f"r{index}", prompt, params, asks=(given,), **more)


@functools.cache
def answers() -> list[list[int]]:
    return [judged(tiny_whisper(), noise(seed), prompt, TOKENS)[1] for seed, prompt in ASKED]


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_transformers(mode: str) -> None:
    core, num_preemptions = whisper_core(**MODES[mode]), 0
    for turn in range(2):  # the second finds what the first left
        results = run(core, [request(i, noise(seed), prompt) for i, (seed, prompt) in enumerate(ASKED)])
        same = [results.tokens[f"r{i}"] == answers()[i] for i in range(len(ASKED))]
        assert all(same) or mode == "int8", (turn, same)
        assert sum(same) >= 3
        num_preemptions += sum(final.num_preemptions for final in results.final.values())
    assert num_preemptions or mode != "few blocks"
    assert_idle(core)
    core.shutdown()


def test_a_continued_answer_is_the_same() -> None:
    core = whisper_core()
    results = run(core, [request(0, noise(1), ASKED[0][1], output_token_ids=answers()[0][:2])])
    assert results.tokens["r0"] == answers()[0][2:]


def test_a_prefix_belongs_to_its_sound() -> None:
    core, prompt, cached = whisper_core(), ASKED[3][1], []
    for index, seed in enumerate((3, 1, 3)):
        results = run(core, [request(index, noise(seed), prompt)])
        cached.append(results.final[f"r{index}"].num_cached_tokens)
    assert cached == [0, 0, len(prompt) // 4 * 4]


def test_new_weights_and_sleep_forget_what_was_encoded() -> None:
    core = whisper_core()
    worker = core.executor._worker  # type: ignore[attr-defined]
    for _ in range(2):
        results = run(core, [request(0, noise(1), ASKED[0][1])])
        assert results.tokens["r0"] == answers()[0]
        worker.sleep(1)
        worker.wake_up(["weights", "kv_cache"])


def test_what_does_not_fit_is_refused_by_name() -> None:
    core, given, prompt = whisper_core(), noise(1), ASKED[0][1]
    for other in (
        noise(1, num_mels=21),
        noise(1, num_positions=49),
        replace(given, length=49),
        replace(given, values=given.values[:-4]),
        replace(given, digest=b"short"),
        replace(given, values=np.full(given.shape, np.nan, "<f4").tobytes()),
    ):
        with pytest.raises(InvalidRequestError, match=r"^input: "):
            core.add_request(request(0, other, prompt))
    with pytest.raises(UnsupportedError, match="reads audio, not text"):
        core.add_request(request(0, replace(given, kind="text"), prompt))
    with pytest.raises(UnsupportedError, match="generates from a sound"):
        core.add_request(replace(request(0, given, prompt), asks=()))
    deaf = core_of(str(tiny_model()))
    with pytest.raises(UnsupportedError, match="has no encoder"):
        deaf.add_request(request(0, given, prompt))
