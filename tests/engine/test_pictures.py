"""Requests that show pictures, through the whole engine: chunks, prefix hits, preemption within a picture and steps in
flight give transformers' tokens; equal pixels of other settings share nothing."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import ConfigError, InvalidRequestError, UnsupportedError
from app.records.media import MediaAsk
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, run
from tests.tiny_media import judged, prompt_of, tiny_media_model
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import decode_statically

NAME, WHOLE_NAME, TOKENS = "qwen3_vl", "gemma3", 6
PARTS: list[list[Any]] = [
    [[5, 6, 7], (8, 6, 1), [8, 9], (4, 4, 2), [10]],
    [[5, 6, 7], (8, 6, 1), [8, 9], (4, 4, 3), [11, 12]],  # the first picture is shared
    [[20, 21]],
    [(10, 8, 4), [22, 23, 24]],
    [[30, 31, 32], (4, 6, 5)],  # nothing behind it: what is left of a cached prompt is one token that shows
]
WHOLE = {"max_num_batched_tokens": 256}
MODES: dict[str, dict[str, Any]] = {
    "all at once": WHOLE,
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "few blocks": {"num_blocks": 15, "max_num_batched_tokens": 24},
    "static steps, one in flight": {**WHOLE, "static": True, "max_inflight_steps": 1},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "host tier": {"kv_host_memory_bytes": 1 << 18, "num_blocks": 24, "max_num_batched_tokens": 64},
    "no caches": {**WHOLE, "enable_prefix_caching": False, "encoder_cache_bytes": 0},
}


def core_of(model: str, **options: Any) -> EngineCore:
    static = options.pop("static", False)
    engine = {
        "device": "cpu",
        "num_threads": 1,
        "block_size": 4,
        "num_blocks": 128,
        "max_model_len": 128,
        "max_num_seqs": 8,
    }
    config = EngineConfig(model=model, **{**engine, **options})
    info = ModelInfo.of(config)
    core = EngineCore(config, info, InProcessExecutor(config), KEY)
    core.start()
    if static:
        decode_statically(core.executor._worker, [1, 2, 4, 8])  # type: ignore[attr-defined]
    return core


def request(index: int, tokens: list[int], ask: MediaAsk, **more: Any) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    return EngineRequest(f"r{index}", tokens, params, asks=(ask,) if ask.items else (), **more)


@functools.cache
def answers(name: str) -> list[list[int]]:
    return [judged(name, *prompt_of(name, parts), TOKENS)[1] for parts in PARTS]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(NAME)


# Of a model whose pictures are not cut, those in which the scheduler would cut them.
CASES = [*((NAME, mode) for mode in MODES), (WHOLE_NAME, "chunks of 7"), (WHOLE_NAME, "few blocks")]


@pytest.mark.parametrize(("name", "mode"), [pytest.param(*case, id=" ".join(case)) for case in CASES])
def test_tokens_are_those_of_transformers(name: str, mode: str) -> None:
    core = core_of(str(tiny_media_model(name)), **MODES[mode])
    num_preemptions = 0
    for turn in range(2):  # the second finds what the first left
        results = run(core, [request(i, *prompt_of(name, parts)) for i, parts in enumerate(PARTS)])
        assert [results.tokens[f"r{i}"] for i in range(len(PARTS))] == answers(name), turn
        num_preemptions += sum(final.num_preemptions for final in results.final.values())
    assert num_preemptions or mode != "few blocks" or name != NAME
    core.shutdown()


def test_a_continued_answer_is_the_same(expected: list[list[int]]) -> None:
    core = core_of(str(tiny_media_model(NAME)))
    tokens, ask = prompt_of(NAME, PARTS[0])
    results = run(core, [request(0, tokens, ask, output_token_ids=expected[0][:2])])
    assert results.tokens["r0"] == expected[0][2:]


def test_equal_pixels_of_another_digest_share_nothing() -> None:
    core = core_of(str(tiny_media_model(NAME)))
    tokens, ask = prompt_of(NAME, PARTS[0])
    other = MediaAsk(tuple(replace(item, digest=item.digest[::-1]) for item in ask.items))
    cached = []
    for index, own in enumerate((ask, other, ask)):
        results = run(core, [request(index, tokens, own)])
        cached.append(results.final[f"r{index}"].num_cached_tokens)
    assert cached == [0, 0, len(tokens) // 4 * 4]


def test_what_does_not_fit_is_refused_by_name() -> None:
    tokens, ask = prompt_of(NAME, PARTS[0])
    core = core_of(str(tiny_media_model(NAME)), max_item_tokens=11)
    with pytest.raises(InvalidRequestError, match="takes 12 tokens, more than max_item_tokens=11"):
        core.add_request(request(0, tokens, ask))
    moved = MediaAsk((ask.items[0], replace(ask.items[1], offset=ask.items[0].offset + 1)))
    with pytest.raises(InvalidRequestError, match="are taken"):
        core.add_request(request(0, tokens, moved))
    cut = MediaAsk((replace(ask.items[0], pixels=b"short"),))
    with pytest.raises(InvalidRequestError, match="cut off"):
        core.add_request(request(0, tokens, cut))
    for blind in (
        core_of(str(tiny_media_model(NAME)), language_model_only=True),
        core_of(str(tiny_model())),
    ):
        with pytest.raises(UnsupportedError, match="takes text only"):
            blind.add_request(request(0, tokens, ask))


def test_a_step_must_hold_a_picture_that_cannot_be_cut() -> None:
    with pytest.raises(ConfigError, match="set it to 12 or more"):
        core_of(str(tiny_media_model(WHOLE_NAME)), max_num_batched_tokens=11)


def test_the_text_part_alone(expected: list[list[int]]) -> None:
    core = core_of(str(tiny_media_model(NAME)), language_model_only=True)
    assert core.executor._worker._parts.model.encoder is None  # type: ignore[attr-defined]
    results = run(core, [request(2, *prompt_of(NAME, PARTS[2]))])
    assert results.tokens["r2"] == expected[2]
