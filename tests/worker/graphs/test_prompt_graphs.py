"""The start-up of graphs of steps with prompts, with a CUDA that only remembers; on a GPU, the steps themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.errors import ConfigError
from app.layers.context import HiddenStates
from app.worker.graphs import cuda_graphs, prompt_graphs
from app.worker.graphs.graph_setup import GraphSetup
from app.worker.graphs.prompt_graphs import PromptGraphs, PromptReplays, refusal, waits_up_to
from app.worker.graphs.prompt_step import PromptStep
from app.worker.rows.input_batch import InputBatch
from app.worker.rows.pending_step import StepClock
from tests.engine.core_driver import run
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.graphs.test_cuda_graphs import FakeCuda
from tests.worker.graphs.test_prompt_step import FAMILIES, GROUPS, runs
from tests.worker.spec_decode.test_random_runs import DRAFTERS, engine, pool
from tests.worker.worker_driver import Driver, replay_prompts

CPU = torch.device("cpu")


@pytest.fixture
def driver() -> Driver:
    return Driver(str(tiny_model("llama")), num_blocks=64)


def set_up(driver: Driver, **options: Any) -> GraphSetup:
    runner = driver.worker._runner
    assert runner is not None
    parts = (runner._forward, runner._state, RankGroup(), runner._features)
    return GraphSetup(EngineConfig(max_num_seqs=16, **options), *parts, shares_prefixes=False)


def test_captured_while_the_engine_idles(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr(prompt_graphs, "refusal", lambda *_: None)
    with torch.inference_mode():
        without = set_up(driver, cuda_graph_prompt_tokens=0).reserve()
        setup = set_up(driver, cuda_graph_prompt_tokens=128)
        assert setup.reserve() > without
        monkeypatch.setattr(cuda_graphs, "measure", lambda *_: 1 << 30)
        most = set_up(driver, cuda_graph_prompt_tokens=128).reserve() - (1 << 30)
        assert most == int(0.02 * (1 << 34)), "a small share of the device, whatever the trial says"
        assert setup.capture() is not None
        count = 2 * 3  # sizes, and kinds that 16 rows can have
        assert setup.note.endswith(
            f"; {count} more while the engine idles, those of steps with up to 128 prompt tokens among them"
        )
        prompts = setup.prompts
        assert prompts is not None
        assert prompts.replays == {}
        assert [setup.capture_next() for _ in range(count + 1)] == [*reversed(range(count)), 0]
        assert set(prompts.replays) == set(prompts.seconds) == set(prompts.step.keys)
        prompts.release()
        assert prompts.replays == prompts.seconds == {}
        setup = set_up(driver, cuda_graph_prompt_tokens=128)  # for a KV cache whose size was given
        setup.capture()
        assert setup.capture_next() == count - 1
        monkeypatch.setattr(PromptGraphs, "capture", lambda *_: 1 / 0)
        assert setup.num_missing == count - 1
        assert setup.capture_next() == 0, "after one that failed there are no others"


def test_what_cannot_be_captured_costs_the_others_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr(prompt_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(PromptGraphs, "capture", lambda *_: 1 / 0)
    with torch.inference_mode():
        setup = set_up(driver, cuda_graph_prompt_tokens=128)
        assert setup.reserve() == set_up(driver, cuda_graph_prompt_tokens=0).reserve()
        assert setup.capture() is not None
        assert setup.prompts is None
        with pytest.raises(ConfigError, match=r"cannot be captured: ZeroDivisionError.*cuda_graph_prompt_tokens=0"):
            set_up(driver, cuda_graph_prompt_tokens=128, cuda_graphs="on").reserve()


def test_no_more_of_the_device_than_a_small_share(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver keeps of graphs counts, and where the size of the KV cache was given, too."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    monkeypatch.setattr(prompt_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr("app.worker.graphs.prompt_graphs.MOST_OF_DEVICE", 8 / (1 << 14))  # 8 MiB; each takes 3
    with torch.inference_mode():
        setup = set_up(driver, cuda_graph_prompt_tokens=128)
        assert setup.capture() is not None
        assert [setup.capture_next() > 0 for _ in range(4)] == [True, True, False, False]


def test_a_number_that_cannot_be_had_is_told(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    monkeypatch.setattr("app.worker.graphs.graph_setup.refusal", lambda *_, **__: None)
    with torch.inference_mode():
        setup = set_up(driver, cuda_graph_prompt_tokens=128)
        setup.capture()
        assert setup.note.endswith("; steps with prompts: none (layers that plan such steps on the host)")
        with pytest.raises(ConfigError, match=r"^cuda_graph_prompt_tokens=128, but layers"):
            set_up(driver, cuda_graph_prompt_tokens=128, cuda_graphs="on")


@pytest.mark.parametrize(
    ("from_host", "found", "close"),
    [(1 << 10, 512, 1024), (256, 512, 1024), (256, 256, 256), (100, 256, 1024), (70, 0, 1024)],
)
def test_only_steps_that_wait_for_the_host(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, from_host: int, found: int, close: int
) -> None:
    """The host takes as long as the device for so many tokens; the device starts with it."""
    runner, clock = driver.worker._runner, SimpleNamespace(now=0.0, tokens=0)
    assert runner is not None

    def run(step: PromptStep, key: Any) -> None:
        clock.now, clock.tokens = clock.now + from_host, key.tokens

    def synchronize(_: object) -> None:
        clock.now += max(0, clock.tokens - from_host)
        clock.tokens = 0

    monkeypatch.setattr(PromptStep, "run", run)
    monkeypatch.setattr(prompt_graphs, "CLOSE_TOKENS", close)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(prompt_graphs, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    with torch.inference_mode():
        step = PromptStep(runner._forward, runner._state, 2048)
        assert step.sizes[-1] == 512
        assert waits_up_to(step, CPU) == found
        step.limit(found)
    assert bool(step.keys) == bool(found)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cuda_graph_prompt_tokens": 0}, "as configured"),
        ({"tensor_parallel_size": 2}, "several ranks"),
        ({}, "layers that plan such steps on the host"),
    ],
)
def test_refused(driver: Driver, options: dict[str, Any], reason: str) -> None:
    runner = driver.worker._runner
    assert runner is not None
    config = EngineConfig(**options)
    assert refusal(config, runner._forward) == reason


def test_latent_attention_must_be_asked_for() -> None:
    forward: Any = SimpleNamespace(captures_prompts=True, captures_context=False)
    assert refusal(EngineConfig(cuda_graph_prompt_tokens=256), forward) is None
    assert str(refusal(EngineConfig(), forward)).startswith("latent attention")
    forward.captures_context = True
    assert refusal(EngineConfig(), forward) is None


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_on_a_gpu_give_what_the_steps_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    name, changes = FAMILIES[family]
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graphs": "on", "max_num_seqs": 24}
    driver = Driver(str(tiny_model(name, **changes)), num_blocks=200, cuda_graph_prompt_tokens=192, **options)
    runner = driver.worker._runner
    assert runner is not None
    prompts, runner._prompts = runner._prompts, None
    assert prompts is not None
    expected = [[run.tokens for run in driver.run(runs(group))] for group in GROUPS]
    while driver.worker.capture_next():
        pass
    assert prompts.missing == []
    prompts.seconds.clear()  # so that the smallest runs, and each kind, however busy the device was meanwhile
    prompts.seconds.clear()  # of steps of equal size, others may be quicker
    runner._prompts, ran, load = prompts, set(), prompts.step.load
    monkeypatch.setattr(prompts.step, "load", lambda key, batch: (ran.add(key.kind), load(key, batch)))
    for driver.chunk in (10_000, 48):
        assert [[run.tokens for run in driver.run(runs(group))] for group in GROUPS] == expected
    assert ran == set(prompts.step.kinds)


def gaps_of(driver: Driver, prompts: PromptReplays, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the hidden states of replays are from those of ordinary steps, of the largest; as the driver runs."""
    inside, found = prompts.hidden, list[float]()
    assert driver.worker._runner is not None
    forward = driver.worker._runner._forward

    def both(batch: InputBatch, clock: StepClock) -> HiddenStates | None:
        hidden = inside(batch, clock)
        if hidden is not None:
            ctx = forward.context(batch.positions, batch.attention, None, batch.view.layer_inputs)
            eager = forward.compute(batch.input_ids, ctx).last.float()
            eager = eager if batch.ends is None or not hidden.of_ends else eager[batch.ends]
            found.append(float((hidden.last.float() - eager).abs().max() / eager.abs().max()))
        return hidden

    monkeypatch.setattr(prompts, "hidden", both)
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_latents(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, as they are captured in, where an experts' gate would make much of a rounding: without experts."""
    name, changes = EXPERT_VARIANTS["deepseek_v3-plain"]
    model = str(tiny_model(name, **{**changes, "first_k_dense_replace": 99}))
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_num_seqs": 24, "num_blocks": 200}
    on_gpu = device == "cuda"
    driver = Driver(model, cuda_graphs="on" if on_gpu else "off", cuda_graph_prompt_tokens=192, **options)
    while on_gpu and driver.worker.capture_next():
        pass
    ran = None if on_gpu else replay_prompts(driver.worker)
    prompts = driver.worker._runner._prompts  # type: ignore[union-attr]
    assert prompts is not None
    found = gaps_of(driver, prompts, monkeypatch)
    for driver.chunk in (10_000, 48):
        for group in GROUPS:
            driver.run(runs(group))
    assert ran is None or len(ran) == len(found)
    assert len(found) >= 6
    assert max(found) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle3", "mtp", "mtp-states"])
def test_on_a_gpu_drafts_follow_as_behind_ordinary_steps(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    model, asked = DRAFTERS[drafter](tmp_path)
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": "float32", "cuda_graphs": "on", "block_size": 16}
    found = []
    for most in (0, 64):
        options = {**on_gpu, "max_num_batched_tokens": 64, "cuda_graph_prompt_tokens": most}
        core = engine(model, {**asked, "num_speculative_tokens": 3}, **options)
        while core.use_idle_time():
            pass
        tokens, figures = run(core, pool()).tokens, core.stats().figures
        assert (figures.get("prompt_steps_replayed", 0) > 0) == (most > 0)
        found.append((tokens, [value for name, value in sorted(figures.items()) if "draft" in name]))
        core.shutdown()
    assert found[0] == found[1]
