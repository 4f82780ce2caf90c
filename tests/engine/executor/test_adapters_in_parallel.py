"""Adapters over tensor- and pipeline-parallel ranks: the tokens of one rank, which are PEFT's (tests/worker/lora)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.engine import control
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.engine.executor.in_process import InProcessExecutor
from app.errors import MantaError
from app.records.adapter import AdapterAsk
from app.records.request import EngineRequest
from tests.adapters import pair, peft_adapter, write_adapter
from tests.engine.core_driver import KEY, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.engine.executor.test_parallel_tokens import SHAPE, make_config, requests
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}
ENDS = ["embed_tokens", "lm_head"]
EXTRAS: list[dict[str, Any]] = [
    {"r": 4, "use_dora": True, "bias": "lora_only", "target_modules": TARGETS},
    {"r": 20, "use_dora": True, "target_modules": [*ENDS, "o_proj"]},
    {"r": 3, "lora_bias": True, "target_modules": ["q_proj", "o_proj", *ENDS[1:]]},
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("qwen2", **SHAPE)


@pytest.fixture(scope="module")
def adapters(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root, ranks = tmp_path_factory.mktemp("adapters"), (4, 8, 20)
    return [peft_adapter(directory, root / str(r), r, 0.4, r=r, target_modules=TARGETS) for r in ranks]


def tokens(
    directory: Path, executor_of: Any, adapters: list[Path], count: int = 24, **options: Any
) -> dict[str, list[int]]:
    """Requests without an adapter and with three, more than there are slots; some are preempted."""
    config = make_config(directory, **LORA, **options)
    executor: Executor = executor_of(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    try:
        core.start()
        asks: list[AdapterAsk | None] = [None, *(_load(core, path) for path in adapters)]
        found = run(core, [_asking(request, asks[n % 4]) for n, request in enumerate(requests(count, temperature=0.0))])
        assert_idle(core)
        with pytest.raises(MantaError, match="the model has no such layer"):
            _load(core, write_adapter(adapters[0].parent / "bad", pair("model.layers.7.mlp.up_proj")))
        return found.tokens
    finally:
        core.shutdown()


def _load(core: EngineCore, path: Path) -> AdapterAsk:
    digest = control.run(core, "load_adapter", {"name": path.name, "path": str(path)})
    return AdapterAsk(path.name, bytes.fromhex(digest))


def _asking(request: EngineRequest, ask: AdapterAsk | None) -> EngineRequest:
    if ask is None:
        return request
    return replace(request, asks=(ask,))


@pytest.mark.parametrize(
    ("tied", "parallel"),
    [(True, {"tensor_parallel_size": 2}), (False, {"tensor_parallel_size": 2}), (True, {"pipeline_parallel_size": 2})],
    ids=["tied tp", "tp", "tied pp"],
)
def test_what_adapters_have_beside_matrices(tmp_path: Path, tied: bool, parallel: dict[str, int]) -> None:
    """DoRA's norms are sums over ranks, biases are one rank's to add, and tables are split by tokens."""
    model = tiny_model("qwen2", tie_word_embeddings=tied, **SHAPE)
    adapters = [peft_adapter(model, tmp_path / str(seed), seed, 0.4, **kind) for seed, kind in enumerate(EXTRAS)]
    own = tokens(model, InProcessExecutor, adapters, 8, executor="in_process", lora_extras=True)
    assert tokens(model, ForkedExecutor, adapters, 8, lora_extras=True, **parallel) == own


EXPERTS: list[dict[str, Any]] = [
    {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    {"r": 20, "target_modules": ["o_proj"], "target_parameters": ["experts.down_proj"]},
    {"r": 3, "target_modules": ["k_proj"]},
]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tp", "ep", "pp"],
)
def test_adapters_of_experts(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Ranks hold shares of each expert's width, whole experts, or layers."""
    family, changes = EXPERT_VARIANTS["mixtral"]
    model = tiny_model(family, **changes)
    adapters = [peft_adapter(model, tmp_path / str(seed), seed, 0.4, **kind) for seed, kind in enumerate(EXPERTS)]
    own = tokens(model, InProcessExecutor, adapters, 8, executor="in_process", lora_experts=True)
    assert tokens(model, ForkedExecutor, adapters, 8, lora_experts=True, **parallel) == own


@pytest.fixture(scope="module")
def one_rank(directory: Path, adapters: list[Path]) -> dict[str, list[int]]:
    return tokens(directory, InProcessExecutor, adapters, executor="in_process")


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"])
def test_tokens_are_those_of_one_rank(
    directory: Path, adapters: list[Path], one_rank: dict[str, list[int]], parallel: dict[str, int]
) -> None:
    assert tokens(directory, ForkedExecutor, adapters, **parallel) == one_rank
