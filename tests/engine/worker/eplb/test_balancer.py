"""Experts that move between two ranks in the midst of answers change no token; counts leave padding out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from app.config import EngineConfig
from app.engine.core import EngineCore
from app.engine.layers.experts.expert_map import ExpertMap
from app.engine.layers.experts.expert_share import ExpertShare
from app.engine.layers.experts.placement import first_slots
from app.engine.model_info import ModelInfo
from app.engine.worker.eplb.exchange import moves_between, turns_of
from app.kernels.moe import Routing
from tests import limits
from tests.engine.core_driver import KEY, assert_idle, make_request, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.engine.models.expert_variants import EXPERT_VARIANTS
from tests.hf_logprobs import prompts
from tests.tiny_models import hf_greedy, hf_model, tiny_model

MAX_TOKENS = 20
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def share(rank: int, num_experts: int = 7, num_redundant: int = 1) -> ExpertShare:
    return ExpertShare(num_experts, first_slots(num_experts, 2, num_redundant), rank, 8, 0, moves=True)


def test_each_copy_of_a_token_is_computed_by_one_rank() -> None:
    """Whatever the placement; a copy follows from the position alone."""
    rng = np.random.default_rng(0)
    maps = [ExpertMap(share(rank), torch.device("cpu")) for rank in (0, 1)]
    positions = torch.arange(240)
    for _ in range(3):
        ids = torch.from_numpy(rng.integers(-1, 7, (240, 2))).int()
        both = [one.of_rank(Routing(ids, torch.ones(240, 2)), positions).ids for one in maps]
        assert ((both[0] >= 0).int() + (both[1] >= 0).int() == (ids >= 0).int()).all()
        for rank, found in enumerate(both):
            held = torch.from_numpy(maps[rank].slots[rank])
            assert (held[found[found >= 0].long()] == ids[found >= 0]).all()
        slots = rng.permutation(np.concatenate([np.arange(7), rng.integers(0, 7, 1)])).reshape(2, 4)
        for one in maps:
            one.hold(slots)
    twice = np.array([[0, 1, 2, 3], [0, 4, 5, 6]])
    maps[0].hold(twice)
    found = maps[0].of_rank(Routing(torch.zeros(240, 1).int(), torch.ones(240, 1)), positions).ids
    assert int((found >= 0).sum()) == 120


def test_padding_is_not_counted() -> None:
    one = ExpertMap(share(0), torch.device("cpu"))
    ids = torch.tensor([[0, 6], [-1, -1], [6, 2]], dtype=torch.int32)
    one.of_rank(Routing(ids, torch.ones(3, 2)), torch.arange(3))
    assert one.counts.tolist() == [1, 0, 1, 0, 0, 0, 2]


def test_moves_have_a_source_that_holds_the_expert() -> None:
    held, wanted = np.array([[0, 1, 2], [3, 4, 0]]), np.array([[0, 3, 1], [2, 4, 2]])
    moves = list(moves_between(held, wanted))
    assert [move.target for move in moves] == [(0, 1), (0, 2), (1, 0), (1, 2)]
    assert [held[move.source] for move in moves] == [wanted[move.target] for move in moves]
    assert moves[1].source == (0, 1), "from its own rank where that has it"
    turns = list(turns_of(moves, 2))
    assert [move for turn in turns for move in turn] == moves
    assert [len(turn) for turn in turns] == [2, 2], "rank 0 takes part in three"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("qwen3_moe", {"num_redundant_experts": 1}),
        pytest.param("mixtral", {"num_redundant_experts": 1}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {"num_redundant_experts": 0}, marks=pytest.mark.slow),
    ],
)
def test_experts_that_move_between_steps_change_no_token(name: str, options: dict[str, Any]) -> None:
    family, changes = EXPERT_VARIANTS[name]
    directory = tiny_model(family, **{**changes, **HEADS})
    judge, asked = hf_model(directory), prompts((3, 16, 37, 60))
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        executor="local_processes",
        max_model_len=128,
        num_threads=1,
        step_timeout_s=limits.patience_s(),
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_window_size=4,
        eplb_step_interval=6,
        **{"block_size": 8, "num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options},
    )
    core = EngineCore(config, ModelInfo.from_directory(config.model), ForkedExecutor(config), KEY)
    try:
        core.start()
        requests = [
            make_request(f"r{i}", prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            for i, prompt in enumerate(asked)
        ]
        results = run(core, requests)
        assert_idle(core)
        stats = core.stats()
    finally:
        core.shutdown()
    assert stats.moved_experts_total > 0, "nothing was moved"
    assert stats.expert_imbalance >= 1.0
    assert [results.tokens[f"r{i}"] for i in range(len(asked))] == [hf_greedy(judge, one, MAX_TOKENS) for one in asked]
