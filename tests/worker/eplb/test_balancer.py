"""Experts that move between two ranks in the midst of answers change no token; counts leave padding out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import RankGroup
from app.engine import control
from app.engine.core import EngineCore
from app.errors import ConfigError
from app.kernels.moe import Routing
from app.layers.experts.expert_map import ExpertMap
from app.layers.experts.expert_share import ExpertShare
from app.layers.experts.placement import first_slots
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.worker.eplb.balancer import check_alike
from app.worker.eplb.exchange import moves_between, turns_of
from tests import limits
from tests.engine.core_driver import KEY, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.hf_logprobs import errors_of, prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.quantization.stored_forms import PLAIN_FORMS
from tests.quantization.test_two_ranks import EXACT, ROUNDED, Answer
from tests.tiny_models import hf_model, tiny_model

MAX_TOKENS = 20


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


def test_ranks_that_store_experts_unlike_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a checkpoint leaves the experts of one rank as they are: bytes of one would be taken for the other's."""
    layers = [SimpleNamespace(slot_tensors=[torch.zeros(2, 3, dtype=kind)]) for kind in (torch.int32, torch.float16)]
    group, said = RankGroup(), []

    def all_gather(_: RankGroup, own: torch.Tensor, dim: int) -> torch.Tensor:
        said.append(own)
        return torch.cat((said[0], own), dim=dim)

    monkeypatch.setattr(RankGroup, "all_gather", all_gather)
    check_alike(layers, group, torch.device("cpu"))
    layers[1].slot_tensors = [torch.zeros(2, 4, dtype=torch.float16)]
    with pytest.raises(ConfigError, match="expert layer 1 of this stage") as error:
        check_alike(layers, group, torch.device("cpu"))
    assert error.value.param == "enable_eplb"


EP2 = {"tensor_parallel_size": 2, "num_redundant_experts": 1}
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", None, EP2),
    "a-scale-an-expert": ("qwen3_moe", "fp8-tensor", EP2),
    "mixtral": ("mixtral", None, EP2),
    "no-copies": ("glm4_moe", None, {**EP2, "num_redundant_experts": 0}),
    "words": ("qwen3_moe", "w4-words", EP2),
    "four-ranks": ("qwen3_moe", None, {"tensor_parallel_size": 4, "num_redundant_experts": 3}),
    "four-ranks-of-blocks": ("deepseek_v3", "fp8-block", {"tensor_parallel_size": 4, "num_redundant_experts": 4}),
    "stages": ("qwen3_moe", None, {**EP2, "pipeline_parallel_size": 2}),
    "a-stage-without": ("deepseek_v3", None, {**EP2, "pipeline_parallel_size": 3}),  # the first layer is dense
}
BETWEEN: list[dict[str, Any]] = [
    {},
    {"reload_weights": {}},
    {"sleep": {"level": 2}, "wake_up": {}, "reload_weights": {}},
]
IN_CI = ("qwen3_moe", "a-scale-an-expert")
WIDE = {"moe_intermediate_size": 96, "initializer_range": 0.1}


def checkpoint(name: str, form: str | None, folder: Path) -> tuple[Path, Path]:
    """The model's directory, and that of the judge."""
    family, changes = EXPERT_VARIANTS[name]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    directory = tiny_model(family, **{**changes, **heads, **(WIDE if form else {})})
    return (directory, directory) if form is None else (PLAIN_FORMS[form].write(directory, folder), folder / "judge")


def answered(core: EngineCore, asked: list[list[int]], turn: int) -> list[Answer]:
    params = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0
    )
    names = [f"{turn}.{i}" for i in range(len(asked))]
    results = run(core, [EngineRequest(name, one, params) for name, one in zip(names, asked, strict=True)])
    assert_idle(core)
    return [Answer(results.tokens[i], results.logprobs[i], results.prompt_logprobs[i]) for i in names]


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in IN_CI else pytest.mark.slow) for x in CASES])
def test_experts_that_move_between_steps_change_no_token(case: str, tmp_path: Path) -> None:
    """Before and after weights are reloaded, and after they were dropped: they come to where experts were at first."""
    name, form, options = CASES[case]
    directory, judge = checkpoint(name, form, tmp_path)
    asked = prompts((3, 16, 37, 60))
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        executor="local_processes",
        max_model_len=128,
        num_threads=1,
        step_timeout_s=limits.patience_s(),
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_window_size=4,
        eplb_step_interval=6,
        enable_prefix_caching=False,
        **{"block_size": 8, "num_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options},
    )
    core = EngineCore(config, ModelInfo.from_directory(config.model), ForkedExecutor(config), KEY)
    answers, moved = [], [0]
    try:
        core.start()
        for turn, calls in enumerate(BETWEEN):
            for call, arguments in calls.items():
                control.run(core, call, arguments)
            answers.append(answered(core, asked, turn))
            moved.append(core.stats().figures["experts_moved"])
        stats = core.stats()
    finally:
        core.shutdown()
    assert moved == sorted(set(moved)), f"nothing was moved in a turn: {moved}"
    assert stats.figures["expert_imbalance"] >= 1.0
    tokens = [[answer.token_ids for answer in one] for one in answers]
    assert tokens[0] == tokens[1] == tokens[2]
    largest, mean = errors_of(hf_model(judge), asked, answers[-1])
    assert mean < ROUNDED if form and PLAIN_FORMS[form].rounds else largest < EXACT
