"""What is launched in advance: sizes and steps that have all kernels of a start and of ordinary traffic."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch

from app.config import EngineConfig
from app.engine.distributed.parallel_groups import RankGroup
from app.engine.worker.graphs.cuda_graphs import cascade_sizes, graph_sizes, telling_sizes
from app.engine.worker.graphs.graph_setup import GraphSetup
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.warmup import rehearsal
from tests.engine.worker_driver import Driver
from tests.tiny_models import tiny_model


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
        ({"max_num_seqs": 4, "attention_backend": "torch"}, []),  # its attention is really computed
    ],
)
def test_steps_fit_the_engine(options: dict[str, Any], steps: list[tuple[int, int, bool]]) -> None:
    made = rehearsal.rehearsed_steps(EngineConfig(model="m", max_num_batched_tokens=48, **options), 4096)
    long = [(len(counts), counts[0], cascade) for counts, context, cascade in made if context == 4095]
    assert long == steps
    assert [counts for counts, _, _ in made if counts[0] > 1] == [[16], [32], [48]]
    assert all(len(counts) <= options["max_num_seqs"] for counts, _, _ in made)


@torch.inference_mode()
def test_what_is_rehearsed_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Driver(str(tiny_model("llama")), num_blocks=64).worker._runner
    assert isinstance(runner, ModelRunner)
    config, cpu = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64), torch.device("cpu")
    monkeypatch.setattr("app.engine.worker.graphs.graph_setup.refusal", lambda *_: None)
    graphs = GraphSetup(config, runner, torch.float32, cpu, RankGroup())
    caches, tokens = [cache.clone() for cache in runner.kv_caches], runner._state.flat_token_ids.clone()
    rehearsal.launch_all(config, runner, graphs, 64, cpu)
    assert all(torch.equal(cache, before) for cache, before in zip(runner.kv_caches, caches, strict=True))
    assert torch.equal(runner._state.flat_token_ids[:-1], tokens[:-1])  # nobody reads where draws go


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "launch_all", lambda *_: pytest.fail("nothing is compiled here"))
    Driver(str(tiny_model("llama")), num_blocks=64)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_alone_goes_on_after_a_failure(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, it must not: the others wait in a sum that it is not in."""

    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rehearsal, "launch_all", fail)
    monkeypatch.setattr("app.kernels.compile_ahead.compile_ahead", lambda _: nullcontext())
    config = EngineConfig(model="m", tensor_parallel_size=ranks, executor="local_processes")
    runner, graphs = cast("ModelRunner", None), cast("GraphSetup", None)
    with pytest.raises(RuntimeError, match="no memory") if ranks > 1 else nullcontext():
        rehearsal.rehearse(config, runner, graphs, 64, torch.device("cuda"))
