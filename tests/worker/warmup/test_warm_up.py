"""What is launched in advance: sizes and steps that have all kernels of a start and of ordinary traffic."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.config.engine import EngineConfig
from app.errors import CheckpointError
from app.worker.forward_pass import ForwardPass
from app.worker.graphs.cuda_graphs import cascade_sizes, graph_sizes, telling_sizes
from app.worker.graphs.static_step import StaticStep
from app.worker.lora.adapters import Adapters
from app.worker.lora.layer_delta import LayerDelta
from app.worker.rows.worker_feature import WorkerFeatures
from app.worker.warmup.plan import compiled_steps, generation_plan, pooling_plan
from app.worker.warmup.warm_up import WarmUp, fitting
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver

CPU = torch.device("cpu")


def test_telling_sizes() -> None:
    sizes = graph_sizes(EngineConfig(model="m", max_num_seqs=300))
    assert telling_sizes(sizes) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert telling_sizes(cascade_sizes(sizes)) == [8, 16, 32, 64, 128, 256, 300]
    assert telling_sizes([5, 7]) == [5, 7]
    assert telling_sizes([]) == []


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_num_seqs": 6, "cascade_attention": "off"}, [(count, 1, False) for count in (1, 2, 4, 6)]),
        ({"max_num_seqs": 4}, [(1, 1, False), (2, 1, False), (4, 1, False), (2, 1, True), (4, 1, True)]),
        ({"max_num_seqs": 1}, [(1, 1, False)]),
        ({"max_num_seqs": 4}, []),  # attention that plans on the host is really computed
    ],
)
def test_steps_fit_the_engine(options: dict[str, Any], steps: list[tuple[int, int, bool]]) -> None:
    compiles = bool(steps)
    made = compiled_steps(EngineConfig(model="m", max_num_batched_tokens=48, **options), 4096, compiles=compiles)
    long = [(len(step.counts), step.counts[0], step.cascade) for step in made if step.context == 4095]
    assert long == steps
    assert [step.counts for step in made if step.counts[0] > 1] == [(16,), (32,), (48,)]
    assert all(len(step.counts) <= options["max_num_seqs"] for step in made)


@pytest.mark.parametrize(
    ("sizes", "max_model_len", "short_query", "counts"),
    [
        ((3, 10), 4, 0, (4, 3, 3)),
        ((4, 40), 64, 5, (5, 5, 5, 25)),  # short ones take the most memory a token
        ((4, 40), 20, 5, (5, 5, 15, 15)),
        ((4, 40), 12, 5, (5, 12, 12, 11)),
        ((4, 40), 8, 5, (8, 8, 8, 8)),
        ((8, 16), 64, 5, (2,) * 8),  # all are short
        ((1, 16), 64, 5, (16,)),
        ((4, 40), 64, 1 << 62, (10,) * 4),
    ],
)
def test_the_largest_step_has_every_token_and_every_row(
    sizes: tuple[int, int], max_model_len: int, short_query: int, counts: tuple[int, ...]
) -> None:
    config = EngineConfig(model="m", max_num_seqs=sizes[0], max_num_batched_tokens=sizes[1])
    plan = generation_plan(config, max_model_len, on_gpu=True, compiles=True, short_query=short_query)
    assert plan.largest is not None
    assert plan.largest.counts == counts


def test_pooling_prompts_fill_a_step_on_a_gpu_and_fit_the_blocks() -> None:
    config = EngineConfig(model="m", max_num_seqs=8, block_size=16)
    plan = pooling_plan(config, 100, 250, on_gpu=True)
    assert plan.prompts == (100, 100, 50)
    assert plan.measured_blocks >= sum(-(-length // 16) for length in plan.prompts)
    assert pooling_plan(config, 100, 250, on_gpu=False).prompts == (16,)
    assert fitting(plan.prompts, 100, 16) == plan.prompts
    assert fitting(plan.prompts, 9, 16) == (100, 32)
    assert fitting(plan.prompts, 7, 16) == (100,)


@torch.inference_mode()
def test_what_is_launched_can_be_run() -> None:
    runner = Driver(str(tiny_model("llama")), num_blocks=64).worker._runner
    assert runner is not None
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64)
    forward, state = runner._forward, runner._state
    caches, tokens = [cache.clone() for cache in forward.cache.tensors], state.flat_token_ids.clone()
    WarmUp(config, generation_plan(config, 64, on_gpu=True, compiles=True), forward, CPU, runner._features).launch(
        StaticStep(forward, state, runner._features, graph_sizes(config))
    )
    assert all(torch.equal(cache, before) for cache, before in zip(forward.cache.tensors, caches, strict=True))
    assert torch.equal(state.flat_token_ids[:-1], tokens[:-1])  # nobody reads where draws go


@torch.inference_mode()
def test_every_step_is_launched_with_adapters_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none of their kernels is compiled in the midst of traffic; the largest step is measured with them."""
    driver = Driver(str(tiny_model("llama")), num_blocks=64, enable_lora=True)
    runner = driver.worker._runner
    assert runner is not None
    sorted_tokens: list[int] = []
    (adapters,) = runner._features.standing_in
    assert isinstance(adapters, Adapters)
    rows_by_slot = adapters._ops.rows_by_slot
    ops = replace(
        adapters._ops, rows_by_slot=lambda slots, *n: sorted_tokens.append(len(slots)) or rows_by_slot(slots, *n)
    )
    monkeypatch.setattr(adapters, "_ops", ops)
    products: list[object] = []
    over = LayerDelta.over
    monkeypatch.setattr(LayerDelta, "over", lambda *given: products.append(given[0]) or over(*given))
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64)
    plan = generation_plan(config, 64, on_gpu=True, compiles=True)
    warm_up = WarmUp(config, plan, runner._forward, CPU, runner._features)
    warm_up.launch(None)
    assert sorted(sorted_tokens) == sorted(sum(step.counts) for step in plan.compile)
    assert sorted_tokens[0] == max(max(step.counts) for step in plan.compile), "its kernels take longest to compile"
    assert len(products) == len(plan.compile) * len(set(products))
    warm_up.largest(runner)
    assert sorted_tokens[-1] == 64
    assert adapters._step.rows is None


def test_nothing_is_compiled_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WarmUp, "launch", lambda *_: pytest.fail("nothing is compiled here"))
    Driver(str(tiny_model("llama")), num_blocks=64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_alone_goes_on_after_a_failure(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of several must not: the others wait in a sum that it is not in."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(WarmUp, "launch", fail)
    monkeypatch.setattr("app.kernels.compile_ahead.compile_ahead", lambda *_: nullcontext())
    config = EngineConfig(model="m", tensor_parallel_size=ranks, executor="local_processes")
    plan = generation_plan(config, 64, on_gpu=True, compiles=True)
    warm_up = WarmUp(config, plan, cast("ForwardPass", None), torch.device("cuda"), WorkerFeatures([]))
    with pytest.raises(RuntimeError, match="no memory") if ranks > 1 else nullcontext():
        warm_up.compile(None)


@pytest.mark.parametrize(
    ("runner", "name"),
    [
        ("generate", "lm_head.weight"),
        ("generate", "model.layers.1.self_attn.k_proj.weight"),
        ("generate", "model.layers.1.self_attn.v_proj.weight"),
        ("pooling", "model.layers.1.mlp.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_model_that_computes_no_numbers_does_not_start(runner: str, name: str, damage: float, tmp_path: Path) -> None:
    """Each of its answers would be token 0 without end, with status 200."""
    directory = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    tensors[name][3] = damage
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match="the model computes NaN or infinity in float32: its weights or the"):
        Driver(str(directory), num_blocks=64, runner=runner)
    Driver(str(directory), num_blocks=64, runner=runner, load_format="dummy")
