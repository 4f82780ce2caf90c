"""The feature in a worker: what is shown twice is encoded once, text needs nothing of it, new weights forget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.layers import picture_attention
from app.layers.rotary import ROPE_POSITIONS
from app.models.multimodal.qwen_vision import TABLE_BYTES
from app.records.media import MediaAsk, MediaItem
from app.records.request import EngineRequest
from app.records.step import NewRequest
from app.worker.media.media import HITS, QUERIES, Media, dealt
from tests.engine.core_driver import KEY, run
from tests.tiny_media import judged, prompt_of, tiny_media_model
from tests.worker.worker_driver import Driver, Run, greedy, replay_prompts


@pytest.fixture
def driver() -> Driver:
    return Driver(str(tiny_media_model("qwen3_vl")), max_model_len=128, num_blocks=64)


def feature_of(driver: Driver) -> Media:
    assert driver.worker._parts is not None
    return next(one for one in driver.worker._parts.features._all if isinstance(one, Media))


def test_a_picture_is_encoded_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    feature, calls = feature_of(driver), list[int]()
    encode = feature._encode
    monkeypatch.setattr(feature, "_encode", lambda items: (calls.append(len(items)), encode(items))[1])
    tokens, ask = prompt_of("qwen3_vl", [[5, 6], (4, 6, 1), [7], (4, 4, 2), [8]])
    other, again = prompt_of("qwen3_vl", [(4, 6, 1), [9]])
    driver.chunk = 3
    runs = driver.run([Run(tokens, greedy(3), asks=(ask,)), Run(other, greedy(3), asks=(again,))])
    assert calls == [1, 1]
    alone = driver.run([Run(tokens, greedy(3), asks=(ask,))])
    assert alone[0].tokens == runs[0].tokens
    assert calls == [1, 1]
    feature.weights_change(whole=True)
    driver.run([Run(other, greedy(1), asks=(again,))])
    assert calls == [1, 1, 1]


def test_a_kept_picture_holds_no_neighbour_and_calls_are_as_large_as_was_measured() -> None:
    """Parts of [1, n, C] call themselves contiguous: a small picture kept the memory of the large one beside it."""
    driver = Driver(str(tiny_media_model("qwen2_vl")), max_model_len=128, num_blocks=64)
    feature = feature_of(driver)
    _, ask = prompt_of("qwen2_vl", [[5], (4, 4, 2), [7], (8, 8, 1), [8]])
    sizes = [item.length for item in ask.items]
    with torch.inference_mode():
        feature._made(ask.items)
        kept = [feature._cache.find(item.digest) for item in ask.items]
        assert [one.untyped_storage().nbytes() for one in kept if one is not None] == [one.nbytes for one in kept]
    for most, groups in ((sum(sizes), [2]), (max(sizes), [1, 1])):
        feature._limits = replace(feature._limits, max_item_tokens=most)
        assert [len(group) for group in feature._groups(ask.items)] == groups
    driver.worker.shutdown()


def test_items_are_dealt_out_evenly() -> None:
    assert dealt([5, 1, 4, 3, 3], 2) == [[0, 4], [2, 3, 1]]
    assert dealt([7], 3) == [[0], [], []]


def test_text_needs_nothing_of_it(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    inputs = Media.inputs

    def spy(self: Media, view: Any) -> None:
        inputs(self, view)
        seen.append(set(view.layer_inputs))

    feature = feature_of(driver)
    monkeypatch.setattr(Media, "inputs", spy)
    driver.run([Run([5, 6, 7], greedy(3))])
    assert seen == [set()] * 3
    tokens, ask = prompt_of("qwen3_vl", [[5], (4, 6, 1), [8]])
    driver.run([Run(tokens, greedy(2), asks=(ask,))])
    assert seen[3:] == [{ROPE_POSITIONS, "shown_rows", "shown_embeddings"}, {ROPE_POSITIONS}]
    assert not feature._rows


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_what_follows_the_last_picture_is_text(name: str) -> None:
    """Tokens count on there: with positions by row and column they are a number of the row's away from their places.
    So steps without anything else to show are replayed as those of texts are."""
    tokens, ask = prompt_of(name, [[5], (6, 8, 1), [*range(3, 19)]])
    other, more = prompt_of(name, [(4, 4, 2), [*range(40, 64)]])
    _, first = judged(name, tokens, ask, 3)
    _, second = judged(name, other, more, 3)
    driver = Driver(str(tiny_media_model(name)), max_model_len=128, num_blocks=64, chunk=5)
    ran = replay_prompts(driver.worker, 64)
    found = driver.run(
        [Run(tokens, greedy(3), asks=(ask,)), Run(other, greedy(3), asks=(more,)), Run([7] * 30, greedy(1))]
    )
    assert [run.tokens for run in found[:2]] == [first, second]
    assert ran
    assert not feature_of(driver)._rows


def test_a_video_longer_than_wide_is_followed_by_what_does_not_count_on() -> None:
    feature = feature_of(Driver(str(tiny_media_model("qwen2_vl")), max_model_len=128, num_blocks=64))
    for frames, is_kept in ((2, False), (7, True)):
        item = MediaItem("video", bytes(16), 1, 2 * frames, (frames, 2, 4), (1,), b"x")
        tokens = np.asarray([5, *[301] * (2 * frames), 6, 7, 8], np.int32)
        spec = EngineRequest("r", [], greedy(1), asks=(MediaAsk((item,)),))
        feature.enter(0, NewRequest(0, tokens, len(tokens), 2 * frames + 2, [], spec, ()))
        assert (0 in feature._rows) == is_kept


def test_figures_and_sizes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    feature = feature_of(driver)
    assert driver.info.encoder_tokens == (1 << 30) // (3 * 64 * 4)
    assert feature.later_bytes == (1 << 30) + TABLE_BYTES
    with torch.inference_mode():
        feature._limits = replace(feature._limits, max_item_tokens=40)
        encoder, grids = feature._encoders[0], list[Any]()
        encode = type(encoder).__call__

        def spy(self: Any, pictures: Any) -> torch.Tensor:
            grids.extend(picture.grid for picture in pictures)
            return encode(self, pictures)

        monkeypatch.setattr(type(encoder), "__call__", spy)
        feature.run_largest()
    assert grids == [(1, 12, 12), (1, 2, 2)]  # the smallest, too: its attention may be another kernel's
    counted: dict[str, float] = {}
    execute = driver.worker.execute

    def count(step: Any) -> Any:
        outputs = execute(step)
        for output in outputs:
            for name, value in output.figures.items():
                counted[name] = counted.get(name, 0) + value
        return outputs

    driver.worker.execute = count  # type: ignore[method-assign]
    tokens, ask = prompt_of("qwen3_vl", [[5], (4, 6, 1), [8], (4, 6, 1)])
    driver.chunk = 5
    driver.run([Run(tokens, greedy(1), asks=(ask,))])
    assert counted[QUERIES] == 3  # the items of three chunks
    assert counted[HITS] == 2


def test_attention_both_ways_is_in_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the longest context, and of a layer that sees all of it."""
    driver, seen = Driver(str(tiny_media_model("gemma3")), max_model_len=128, num_blocks=64), list[Any]()
    attend = picture_attention.attend_both_ways

    def spy(query: torch.Tensor, cache: torch.Tensor, blocks: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((tuple(query.shape), len(blocks) * cache.shape[3] >= 128, rest[2]))
        return attend(query, cache, blocks, *rest)

    monkeypatch.setattr(picture_attention, "attend_both_ways", spy)
    feature = feature_of(driver)
    with torch.inference_mode():
        feature._limits = replace(feature._limits, max_item_tokens=4)
        feature.run_largest()
    assert seen == [((4, 2, 32), True, None)]
    driver.worker.shutdown()


def test_an_encoder_takes_no_time_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else tokens seem dear, and prompts with pictures are cut short."""
    config = EngineConfig(
        model=str(tiny_media_model("qwen3_vl")), max_model_len=128, num_blocks=64, max_num_seqs=4,
    )  # fmt: skip
    core = EngineCore(config, ModelInfo.of(config), InProcessExecutor(config), KEY)
    core.start()
    clock = SimpleNamespace(stop=lambda: None, elapsed_s=lambda: 1e6)
    monkeypatch.setattr("app.worker.media.media.StepClock", lambda _: clock)
    tokens, ask = prompt_of("qwen3_vl", [[5, 6], (4, 6, 1), [7, 8]])
    run(core, [EngineRequest("r", tokens, greedy(1), asks=(ask,))])
    costs = core.scheduler._statistics.costs
    assert costs.prefill_token_s == 0
    run(core, [EngineRequest("text", [5, 6, 7], greedy(1))])
    assert costs.prefill_token_s > 0
    core.shutdown()
