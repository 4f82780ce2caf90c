"""Steps with prompts over static tensors, run as they would be replayed: the same tokens, whatever pads them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from app.records.step_places import FULL_PLACES
from app.worker.graphs.prompt_step import KINDS, PromptKey, PromptStep, prompt_sizes
from tests.engine.core_driver import run
from tests.models.families.state_variants import STATE_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.spec_decode.test_random_runs import DRAFTERS, engine, pool
from tests.worker.worker_driver import Driver, Run, greedy, replay_prompts


def runs(lengths: list[int], max_tokens: int = 4, **more: Any) -> list[Run]:
    rng = random.Random(3)
    return [Run([rng.randrange(3, 331) for _ in range(n)], greedy(max_tokens, **more)) for n in lengths]


GROUPS = [[70], [9, 31, 64], [5, 90, 40, 33, 2], [128]]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "two groups of layers": (
        "gemma3_text",
        {"num_hidden_layers": 3, "sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "states": STATE_VARIANTS["qwen3_5"],
    "states and experts": STATE_VARIANTS["nemotron_h-experts"],
}
LATENTS = {"latents": STATE_VARIANTS["kimi_linear"]}  # as they are on a GPU in 16 bits


@pytest.mark.parametrize("family", [*FAMILIES, *LATENTS])
def test_tokens_equal_ordinary_steps(family: str) -> None:
    """Alone, several at once, and in chunks beside rows that decode."""
    name, changes = {**FAMILIES, **LATENTS}[family]
    driver = Driver(str(tiny_model(name, **changes)), num_blocks=64)
    expected = [[run.tokens for run in driver.run(runs(group))] for group in GROUPS]
    ran = replay_prompts(driver.worker)
    for driver.chunk in (10_000, 48):
        found = [[run.tokens for run in driver.run(runs(group))] for group in GROUPS]
        assert found == expected
    assert {64, 128} <= {key.tokens for key in ran}
    takes_context = driver.worker._runner._forward.captures_context  # type: ignore[union-attr]
    assert {key.kind for key in ran} == {*KINDS[: 3 if takes_context else 2]}
    assert takes_context == (family != "latents")


@pytest.mark.parametrize("of_prompts", [{}, {"prompt_logprobs": 1}])
def test_what_features_ask_for_is_there(of_prompts: dict[str, int]) -> None:
    """Logprobs of tokens come from replays, those of prompts from all tokens' hidden states, which no replay leaves."""
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    asked = {"logprobs": 2, **of_prompts}
    expected = driver.run(runs([70, 20], **asked))
    ran = replay_prompts(driver.worker)
    found = driver.run(runs([70, 20], **asked))
    assert bool(ran) != bool(of_prompts)
    for a, b in zip(expected, found, strict=True):
        assert a.tokens == b.tokens
        assert len(b.prompt_logprobs) == (len(b.prompt) - 1 if of_prompts else 0)
        for x, y in zip([*a.prompt_logprobs, *a.logprobs], [*b.prompt_logprobs, *b.logprobs], strict=True):
            assert x is not None
            assert y is not None
            assert x.token_ids == y.token_ids
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


def test_replays_are_counted_and_forgotten() -> None:
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    runner = driver.worker._runner
    assert runner is not None
    ran = replay_prompts(driver.worker)
    outputs, execute = [], driver.worker.execute

    def watched(*arguments: Any) -> Any:
        outputs.extend(made := execute(*arguments))
        return made

    driver.worker.execute = watched  # type: ignore[method-assign]
    driver.run(runs([20, 40]))
    assert sum(output.figures["prompt_steps_replayed"] for output in outputs) == len(ran) > 0
    count = len(ran)
    runner.release_graphs()
    driver.run(runs([20, 40]))
    assert len(ran) == count


def test_sizes() -> None:
    assert prompt_sizes(0) == prompt_sizes(63) == []
    assert prompt_sizes(64) == [64]
    assert prompt_sizes(65) == [64, 65]
    assert prompt_sizes(700) == [64, 128, 192, 256, 320, 384, 448, 512, 640, 700]
    sizes = prompt_sizes(2048)
    assert sizes[-1] == 2048
    assert all(after - before <= max(64, after / 5) for before, after in pairwise(sizes))


def test_a_step_runs_at_the_next_larger_size() -> None:
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    runner = driver.worker._runner
    assert runner is not None
    with torch.inference_mode():
        step = PromptStep(runner._forward, runner._state, 1 << 20)
    assert step.sizes[-1] == 512, "all of a step may be padding, which is a row of max_model_len tokens at most"
    assert {key.decodes for key in step.keys} == {0, 16}, "of 32 rows 64 never decode"
    step.limit(128)
    assert step.keys[:3] == [PromptKey(128, 4, 16), PromptKey(128, 1), PromptKey(64, 1)]
    ran = replay_prompts(driver.worker, 128)
    driver.run(runs([65], 1))
    driver.run(runs([30, 20, 14], 1))
    driver.run(runs([100, 29], 1))  # too many
    driver.run(runs([9] * 5, 1))  # rows
    assert ran == [PromptKey(128, 1), PromptKey(64, 4)]


def test_of_the_steps_that_fit_the_quickest_runs() -> None:
    """What they take is known of steps that were captured; one of far more tokens is not looked at."""
    driver = Driver(str(tiny_model("llama")), num_blocks=64)
    expected = [run.tokens for run in driver.run(runs([65, 20]))]
    ran = replay_prompts(driver.worker, 384)
    replays = driver.worker._runner._prompts  # type: ignore[union-attr]
    assert replays is not None
    replays.seconds |= dict.fromkeys(replays.replays, 2.0)
    replays.seconds[PromptKey(256, 4)] = 0.99  # by a hundredth, for which it is not worth while
    for key in (PromptKey(192, 4), PromptKey(128, 1), PromptKey(64, 4, 16)):
        replays.seconds[key] = 1.0
    assert [run.tokens for run in driver.run(runs([65, 20]))] == expected
    assert ran == [PromptKey(192, 4)]
    del replays.replays[PromptKey(192, 4)]
    driver.run(runs([65, 20], 1))
    assert ran[1:] == [PromptKey(256, 4)]
    del replays.replays[PromptKey(256, 4)]
    replays.seconds[PromptKey(320, 4)] = 1.0
    driver.run(runs([65, 20], 1))
    assert ran[2:] == [PromptKey(128, 4)], "320 are too many"


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "mtp-states"])
def test_drafts_follow_as_behind_ordinary_steps(drafter: str, tmp_path: Path) -> None:
    """By what the last layer gives, what others read, and in layers of their own: as many, and as many right ones."""
    model, asked = DRAFTERS[drafter](tmp_path)
    found: list[tuple[dict[str, list[int]], list[float]]] = []
    for is_replayed in (False, True):
        core = engine(model, {**asked, "num_speculative_tokens": 3}, max_num_seqs=24, num_blocks=400)
        ran = replay_prompts(core.executor._worker, 64) if is_replayed else []  # type: ignore[attr-defined]
        tokens, figures = run(core, pool()[:16]).tokens, core.stats().figures
        found.append((tokens, [value for name, value in sorted(figures.items()) if "draft" in name]))
        core.shutdown()
    assert found[0] == found[1]
    assert any(found[0][1])
    assert {bool(key.decodes) for key in ran} == {False, True}, "alone, and beside rows that decode"


def test_beside_many_rows_that_decode() -> None:
    """Prompts of one token are rows that decode: 40, 70 and 100 of them beside a prompt in chunks."""
    driver = Driver(str(tiny_model("llama")), chunk=48, num_blocks=160, max_num_seqs=160)
    groups = [[1] * 40 + [110], [1] * 70 + [60, 50], [1] * 100 + [50]]
    expected = [[run.tokens for run in driver.run(runs(group, 3))] for group in groups]
    ran = replay_prompts(driver.worker, 128)
    assert [[run.tokens for run in driver.run(runs(group, 3))] for group in groups] == expected
    assert {key.kind for key in ran} >= {kind for kind in KINDS if kind.decodes in (48, 96, 128)}


def test_steps_that_fill_rounds() -> None:
    """Beside numbers of rows that others have more places for: they are kept to those rounds."""
    driver = Driver(str(tiny_model("llama", max_position_embeddings=2048)), num_blocks=64, max_num_seqs=64)
    runner = driver.worker._runner
    assert runner is not None
    with torch.inference_mode():
        step = PromptStep(runner._forward, runner._state, 1024)
    assert step.sizes[-1] == 1024
    found = sorted(key for key in step.keys if key.decodes in FULL_PLACES)
    assert found == sorted(PromptKey(rows - places, 4, places) for rows in (768, 1024) for places in (24, 32, 40))
    assert step.keys[-len(found) :] == sorted(found, key=lambda key: (key.decodes, -key.tokens)), "the least needed"


def test_a_step_that_fills_rounds_serves_no_smaller_ones() -> None:
    """So that one of few tokens is not computed as one of hundreds, where nothing else is captured yet."""
    model = str(tiny_model("llama", max_position_embeddings=2048))
    driver = Driver(model, num_blocks=400, max_num_seqs=64)
    groups = [[1] * 20 + [200], [1] * 20 + [744]]
    expected = [[run.tokens for run in driver.run(runs(group, 6))] for group in groups]
    ran = replay_prompts(driver.worker, 1024)
    replays = driver.worker._runner._prompts  # type: ignore[union-attr]
    assert replays is not None
    for key in [key for key in replays.replays if key.decodes not in FULL_PLACES]:
        del replays.replays[key]
    assert [run.tokens for run in driver.run(runs(groups[0], 6))] == expected[0]
    assert ran == []
    assert [run.tokens for run in driver.run(runs(groups[1], 6))] == expected[1]
    assert ran == [PromptKey(744, 4, 24)]
