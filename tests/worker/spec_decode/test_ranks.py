"""Drafters with weights on several ranks, split or whole on each, and in a pipeline's last stage: the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.errors import UnsupportedError
from tests.engine.core_driver import KEY, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode.mtp_checkpoints import with_layer_behind
from tests.worker.spec_decode.test_chain import MADE, SHAPE
from tests.worker.spec_decode.test_drafting import WISHES, WholeLogprobs, assert_same, generate, make_config, requests

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = [
    ("eagle3-speculators", 2, 1, None),
    ("eagle3-speculators", 2, 1, 1),
    ("eagle3-speculators", 1, 2, None),
    pytest.param("mlp", 2, 1, 1, marks=pytest.mark.slow),
    pytest.param("medusa", 2, 2, None, marks=pytest.mark.slow),
    pytest.param("eagle", 2, 1, None, marks=pytest.mark.slow),
    pytest.param("draft_model", 2, 1, None, marks=pytest.mark.slow),
    pytest.param("draft_model", 2, 2, 1, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama", **SHAPE)


@pytest.fixture(scope="module")
def plain(directory: Path) -> tuple[WholeLogprobs, int]:
    config = make_config(directory)
    return generate(config, InProcessExecutor(config), WISHES)


def speculation(name: str, directory: Path, folder: Path, draft_size: int | None) -> dict[str, Any]:
    """A drafter in a folder; a language model drafts for itself, and is always right."""
    asked: dict[str, Any] = {"num_speculative_tokens": 3, "draft_tensor_parallel_size": draft_size}
    if name == "draft_model":
        return {**asked, "method": name, "model": str(directory)}
    method, make = MADE[name]
    make(folder, hf_model(directory))
    return {**asked, "method": method, "model": str(folder)}


@pytest.mark.parametrize(("name", "tp", "pp", "draft_size"), RANKS)
def test_ranks_agree(
    directory: Path,
    tmp_path: Path,
    plain: tuple[WholeLogprobs, int],
    name: str,
    tp: int,
    pp: int,
    draft_size: int | None,
) -> None:
    """Penalties, logprobs, stop tokens, chunked prompts, preemption and prefix hits among the requests."""
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "executor": "local_processes"}
    config = make_config(directory, speculative_config=speculation(name, directory, tmp_path, draft_size), **sizes)
    results, steps = generate(config, ForkedExecutor(config), WISHES)
    assert_same(results, plain[0])
    assert name != "draft_model" or pp > 1 or steps < 0.75 * plain[1]


@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [
        ("mimo", 1, 2),
        ("qwen3_5", 2, 1),
        pytest.param("ernie4_5_moe", 2, 2, marks=pytest.mark.slow),
        pytest.param("exaone_moe", 2, 1, marks=pytest.mark.slow),
        pytest.param("hy_v3", 1, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 2, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 2, 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, 2, marks=pytest.mark.slow),
        pytest.param("nemotron_h", 2, 1, marks=pytest.mark.slow),
        pytest.param("nemotron_h", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_on_the_drafts_of_the_models_own_layer(tmp_path: Path, family: str, tp: int, pp: int) -> None:
    """In a later stage the layer reads the table of tokens again."""
    model = with_layer_behind(family, tmp_path)[0]
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "executor": "local_processes", "num_blocks": 160}
    asked = {"method": "mtp", "num_speculative_tokens": 3}
    plain, drafting = (make_config(model, num_blocks=160), make_config(model, speculative_config=asked, **sizes))
    told = []
    for config, executor in ((plain, InProcessExecutor(plain)), (drafting, ForkedExecutor(drafting))):
        core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
        core.start()
        told.append(run(core, requests(WISHES)[:8]).tokens)
        figures = core.stats().figures
        core.shutdown()
    assert told[0] == told[1]
    assert figures["draft_tokens"] > 0


def test_a_shared_embedding_must_be_in_the_last_stage(directory: Path, tmp_path: Path) -> None:
    asked = speculation("eagle3", directory, tmp_path, None)
    sizes = {"pipeline_parallel_size": 2, "executor": "local_processes"}
    config = make_config(directory, speculative_config=asked, **sizes)
    executor = ForkedExecutor(config)
    with pytest.raises(UnsupportedError, match="set pipeline_parallel_size=1"):
        executor.start()
    executor.shutdown()
