"""Steps that bring several tokens a row give the very tokens of plain decoding: alone, in pipelines, over transports.

The proposer is not of this tree (prophet.py). It knows the answers but for every fifth position, so drafts are accepted
and rejected all the time; pools are small, so that requests are preempted and find their prefixes again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.backends import PROPOSERS
from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.engine.executor.in_process import InProcessExecutor
from app.records.bad_words import BadWords
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.worker.model_runner import ModelRunner
from app.worker.rows.pending_step import StepClock
from app.worker.worker import Worker
from tests.engine.core_driver import KEY, Results, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode.prophet import ASKED, ENTRY, NAME, ProphetWorker, UnevenWorker, key_of, model_with_prophet
from tests.worker.worker_driver import decode_statically

pytestmark = pytest.mark.usefixtures("one_thread")

WORKER = f"{ProphetWorker.__module__}:{ProphetWorker.__name__}"
UNEVEN = f"{UnevenWorker.__module__}:{UnevenWorker.__name__}"
SHAPE: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
NUM_PROMPTS, MAX_TOKENS = 16, 20
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "min_p": 0.05, "min_tokens": 12, "stop_token_ids": tuple(range(3, 120))},
    {"temperature": 0.9, "stop_token_ids": tuple(range(3, 40))},
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("qwen2", **SHAPE)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    shared = rng.integers(3, 331, 20).tolist()
    made = [rng.integers(3, 331, int(length)).tolist() for length in rng.integers(1, 40, NUM_PROMPTS)]
    return [shared + prompt if number % 2 else prompt for number, prompt in enumerate(made)]


def requests(wishes: list[dict[str, Any]]) -> list[EngineRequest]:
    """Each prompt with one of the wishes after the other."""
    common: dict[str, Any] = {"seed": 3, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    return [
        EngineRequest(
            f"{number}",
            prompt,
            SamplingParams(**{**common, **wishes[number % len(wishes)]}),
            choice_index=number,
            asks=(BadWords(((9,), (17, 30))),) if number % 3 == 0 else (),
        )
        for number, prompt in enumerate(prompts())
    ]


def make_config(model: Path, **options: Any) -> EngineConfig:
    """Chunked prompts, blocks for about a third of the requests, and rows for half of them; no step depends on time."""
    sizes = {"max_model_len": 96, "block_size": 4, "num_blocks": 48, "max_num_seqs": 8, "max_num_batched_tokens": 40}
    usual = {**sizes, "executor": "in_process", "max_step_s": 0.0}
    return EngineConfig(model=str(model), device="cpu", num_threads=1, **{**usual, **options})


class WholeLogprobs(Results):
    """Results, of which each token that has logprobs comes with its own."""

    def take(self, outputs: Any) -> None:
        outputs = list(outputs)
        super().take(outputs)
        for output in outputs:
            assert len(output.logprobs or output.new_token_ids) == len(output.new_token_ids)


def generate(config: EngineConfig, executor: Executor, wishes: list[dict[str, Any]]) -> tuple[WholeLogprobs, int]:
    """The results, and how many steps they took."""
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    try:
        results = WholeLogprobs()
        run(core, requests(wishes), results=results)
        assert_idle(core)
        stats = core.stats()
        assert stats.figures["preemptions"] > 0, "nothing was preempted"
        assert stats.figures["prefix_cache_hits"] > 0, "no prefix was found"
        return results, stats.steps_total
    finally:
        core.shutdown()


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[WholeLogprobs, int]:
    """Token by token."""
    config = make_config(directory)
    return generate(config, InProcessExecutor(config), WISHES)


def answers_of(results: Results) -> dict[str, list[int]]:
    return {key_of(n, prompt): results.tokens[f"{n}"] for n, prompt in enumerate(prompts())}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROPOSERS._table, NAME, ENTRY)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "model"))
    monkeypatch.delitem(sys.modules, "prophet_proposer", raising=False)


@pytest.mark.usefixtures("in_this_process")
def test_greedy_tokens_are_those_of_transformers(directory: Path, tmp_path: Path) -> None:
    model = hf_model(directory)
    truth = [hf_greedy(model, prompt, MAX_TOKENS) for prompt in prompts()]
    answers = {key_of(n, prompt): truth[n] for n, prompt in enumerate(prompts())}
    config = make_config(model_with_prophet(directory, tmp_path, answers), speculative_config=ASKED)
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    assert core.start().num_draft_tokens == 3
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    results = run(core, [EngineRequest(f"{n}", p, params, choice_index=n) for n, p in enumerate(prompts())])
    core.shutdown()
    assert [results.tokens[f"{n}"] for n in range(NUM_PROMPTS)] == truth


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("max_inflight_steps", [1, 2, 4])
def test_every_wish_is_met_in_fewer_steps(
    directory: Path, tmp_path: Path, plain: tuple[WholeLogprobs, int], max_inflight_steps: int
) -> None:
    """The same tokens, logprobs and ends as token by token."""
    expected, num_steps = plain
    model = model_with_prophet(directory, tmp_path, answers_of(expected))
    config = make_config(model, max_inflight_steps=max_inflight_steps, speculative_config=ASKED)
    results, fewer = generate(config, InProcessExecutor(config), WISHES)
    assert_same(results, expected)
    assert fewer < 0.75 * num_steps


def assert_same(results: WholeLogprobs, expected: WholeLogprobs) -> None:
    assert results.tokens == expected.tokens
    assert results.logprobs.keys() == expected.logprobs.keys()
    for name, final in expected.final.items():
        found = results.final[name]
        assert (found.finish_reason, found.stop_reason) == (final.finish_reason, final.stop_reason)
        for ours, theirs in zip(results.logprobs.get(name, ()), expected.logprobs.get(name, ()), strict=True):
            assert ours.token_ids == theirs.token_ids
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


@pytest.mark.parametrize(("tp", "pp"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_stages_of_a_pipeline_agree_on_what_was_accepted(
    directory: Path, tmp_path: Path, plain: tuple[WholeLogprobs, int], tp: int, pp: int
) -> None:
    """All of them: the first embeds drafts that the last one proposed, one in the midst needs the counts alone."""
    model = model_with_prophet(directory, tmp_path, answers_of(plain[0]))
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    config = make_config(model, executor="local_processes", speculative_config=ASKED, **sizes)
    results, _ = generate(config, ForkedExecutor(config, WORKER), WISHES)
    assert_same(results, plain[0])


@pytest.mark.parametrize("pp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_stage_decides_how_it_runs_a_step(
    directory: Path, tmp_path: Path, plain: tuple[WholeLogprobs, int], pp: int
) -> None:
    """One may have captured a step that another has not: what they send each other is the same."""
    model = model_with_prophet(directory, tmp_path, answers_of(plain[0]))
    config = make_config(model, executor="local_processes", pipeline_parallel_size=pp, speculative_config=ASKED)
    results, _ = generate(config, ForkedExecutor(config, UNEVEN), WISHES)
    assert_same(results, plain[0])


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("transport", ["socket", pytest.param("compiled_graph", marks=pytest.mark.slow)])
def test_over_both_transports(
    directory: Path, tmp_path: Path, plain: tuple[WholeLogprobs, int], transport: str
) -> None:
    from app.engine.executor.ray_workers import RayWorkersExecutor  # not on every GPU machine

    model = model_with_prophet(directory, tmp_path, answers_of(plain[0]))
    options: dict[str, Any] = {"executor": "ray_workers", "step_transport": transport}
    config = make_config(model, speculative_config=ASKED, **options)
    results, fewer = generate(config, RayWorkersExecutor(config, WORKER), WISHES)
    assert_same(results, plain[0])
    assert fewer < 0.75 * plain[1]


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize("kind", ["ngram", "by cost", "prophet"])
def test_static_steps_verify_drafts_too(
    directory: Path,
    tmp_path: Path,
    plain: tuple[WholeLogprobs, int],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a GPU's graphs run them: steps of 1 + 3 places a row, or of any number, of which rows fill some; drafts within
    the step, and after it where the proposer works on the host."""
    if kind != "prophet":
        count = 3 if kind == "ngram" else None
        wanted = {"method": "ngram", "num_speculative_tokens": count, "prompt_lookup_min": 1}
        config = make_config(directory, max_inflight_steps=2, speculative_config=wanted)
    else:
        model = model_with_prophet(directory, tmp_path, answers_of(plain[0]))
        config = make_config(model, max_inflight_steps=2, speculative_config=ASKED)
    executor, ran = InProcessExecutor(config), []
    start = Worker.start

    def start_static(worker: Worker) -> Any:
        info = start(worker)
        step = decode_statically(worker, [1, 2, 4, 8])
        forward = step.forward
        monkeypatch.setattr(step, "forward", lambda key: (ran.append(key.drafts), forward(key)))
        return info

    monkeypatch.setattr(Worker, "start", start_static)
    results, fewer = generate(config, executor, WISHES)
    assert_same(results, plain[0])
    assert kind != "prophet" or fewer < 0.75 * plain[1]
    assert len(set(ran)) > 1 if kind == "by cost" else set(ran) in ({3}, {0, 3})


@pytest.mark.usefixtures("in_this_process")
def test_a_step_with_few_drafts_is_not_made_of_empty_places(
    directory: Path, tmp_path: Path, plain: tuple[WholeLogprobs, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a static step have places for drafts: with many of them empty, an ordinary step does less."""
    monkeypatch.setattr("app.worker.model_runner.MOST_EMPTY", 4)
    config = make_config(model_with_prophet(directory, tmp_path, answers_of(plain[0])), speculative_config=ASKED)
    executor, empty, ordinary = InProcessExecutor(config), [], []
    start, run_all = Worker.start, ModelRunner._run

    def start_static(worker: Worker) -> Any:
        info = start(worker)
        step = decode_statically(worker, [1, 2, 4, 8])
        load = step.inputs.load

        def noted(rows: Any, counts: Any = None) -> None:
            empty.append(0 if counts is None else int((4 - counts).sum()))
            load(rows, counts)

        monkeypatch.setattr(step.inputs, "load", noted)
        return info

    def run(runner: ModelRunner, step: Any, clock: StepClock) -> Any:
        if step.samples.all() and step.num_draft_tokens is not None:
            ordinary.append(step.num_tokens)
        return run_all(runner, step, clock)

    monkeypatch.setattr(Worker, "start", start_static)
    monkeypatch.setattr(ModelRunner, "_run", run)
    results, _ = generate(config, executor, WISHES)
    assert_same(results, plain[0])
    assert empty
    assert max(empty) <= 4
    assert ordinary
