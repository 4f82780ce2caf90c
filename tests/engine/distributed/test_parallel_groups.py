"""Collectives over two real processes (gloo), and a whole model split over them: same logits as in one piece."""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.engine.attention.backend import select_attention
from app.engine.attention.kv_cache import KVCacheSpec
from app.engine.distributed.parallel_groups import ParallelGroups, RankGroup
from app.engine.layers.context import BuildContext
from app.engine.model_info import ModelInfo
from app.engine.models.loader import load_model
from app.engine.sampling_params import SamplingParams
from app.engine.step import NewRequest, SchedulerOutput
from app.engine.worker.input_batch import build_input_batch
from app.engine.worker.model_runner import ModelRunner
from app.engine.worker.row_state import RowState
from tests.tiny_models import tiny_model

CPU, BLOCK = torch.device("cpu"), 8


def logits_of_a_step(directory: str, groups: ParallelGroups) -> torch.Tensor:
    """Two prompts in one step: [T, V]."""
    info = ModelInfo.from_directory(directory)
    ctx = BuildContext(torch.float32, CPU, 64, select_attention("torch", CPU)[0], groups)
    with torch.inference_mode():
        model = load_model(info, ctx, "safetensors", 0)
        spec = KVCacheSpec.of(model.attention_layers, BLOCK, torch.float32)
        state = RowState(4, 64, BLOCK, CPU)
        runner = ModelRunner(model, spec.allocate(8, CPU), state, info.vocab_size, CPU)
        letter = SchedulerOutput(0, np.array([2, 0]), np.array([13, 5]), np.array([True, True]))
        rng = np.random.default_rng(0)
        letter.new_requests = [
            NewRequest(
                row, rng.integers(0, info.vocab_size, count), count, 0, blocks, SamplingParams(seed=0), 0, (), ()
            )
            for row, count, blocks in ((2, 13, [6, 1]), (0, 5, [3]))
        ]
        state.apply(letter)
        batch = build_input_batch(letter, state)
        return runner.logits(runner.forward(batch.input_ids, batch.positions, batch.attention))


def rank_main(rank: int, directory: str, rendezvous: str, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
    group = RankGroup(rank, 2, torch.distributed.group.WORLD)
    total = group.all_reduce(torch.tensor([rank + 1.0]))
    joined = group.all_gather(torch.full((2, 1), float(rank)))
    logits = logits_of_a_step(directory, ParallelGroups(tp=group))
    results.put((rank, total.tolist(), joined.tolist(), logits.numpy()))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="gloo over a file")
def test_two_ranks(tmp_path: Path) -> None:
    # One KV head for two ranks, a vocabulary that does not divide: the cases where a share is not plain.
    directory = str(tiny_model("qwen2", num_attention_heads=4, num_key_value_heads=1, head_dim=16))
    processes = get_context("spawn")
    results: Queue[Any] = processes.Queue()
    ranks = [
        processes.Process(target=rank_main, args=(rank, directory, str(tmp_path / "rendezvous"), results), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    expected = logits_of_a_step(directory, ParallelGroups())
    for _ in ranks:
        _, total, joined, logits = results.get(timeout=120)
        assert total == [3.0]
        assert joined == [[0.0, 1.0], [0.0, 1.0]]
        torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0


def test_one_rank_costs_nothing() -> None:
    tensor = torch.ones(3)
    assert RankGroup().all_reduce(tensor) is tensor
    assert RankGroup().all_gather(tensor) is tensor
    assert RankGroup().share_of(7, "anything") == 7


def test_several_ranks_need_a_process_group() -> None:
    with pytest.raises(AssertionError, match="need a process group"):
        RankGroup(0, 2)
