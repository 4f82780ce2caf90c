"""Drafters in captured steps: in fp32 the tokens are those without drafts, with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config.engine import EngineConfig
from app.engine.executor.in_process import InProcessExecutor
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode.mtp_checkpoints import SHAPES, with_layer_behind
from tests.worker.spec_decode.test_chain import MADE, SHAPE
from tests.worker.spec_decode.test_drafting import WISHES, WholeLogprobs, assert_same, generate

pytestmark = pytest.mark.gpu
METHODS = ("eagle3", "draft_model", "ngram", "eagle", "medusa", "mlp")


def config_of(model: Path, speculation: dict[str, Any] | None) -> EngineConfig:
    sizes = {"max_model_len": 96, "block_size": 16, "num_blocks": 12, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    return EngineConfig(
        model=str(model), device="cuda", executor="in_process", dtype="float32", speculative_config=speculation, **sizes
    )


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama", **SHAPE)


@pytest.fixture(scope="module")
def plain(directory: Path) -> WholeLogprobs:
    config = config_of(directory, None)
    return generate(config, InProcessExecutor(config), WISHES)[0]


@pytest.mark.parametrize("count", [3, None])
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_without_drafts(
    directory: Path, plain: WholeLogprobs, tmp_path: Path, name: str, count: int | None
) -> None:
    speculation: dict[str, Any] = {"method": name, "num_speculative_tokens": count}
    if name == "ngram":
        speculation["prompt_lookup_min"] = 1
    elif name == "draft_model":
        speculation["model"] = str(directory)  # always right
    else:
        method, make = MADE[name]
        make(tmp_path, hf_model(directory))
        speculation |= {"method": method, "model": str(tmp_path)}
    config = config_of(directory, speculation)
    results, steps = generate(config, InProcessExecutor(config), WISHES)
    assert_same(results, plain)
    print(name, steps)


@pytest.mark.parametrize("count", [3, None])
@pytest.mark.parametrize("family", SHAPES)
def test_tokens_are_those_without_the_models_own_layer(tmp_path: Path, family: str, count: int | None) -> None:
    """Latent attention, or heads of which half turn; experts in both."""
    model = with_layer_behind(family, tmp_path)[0]
    without, drafting = (config_of(model, one) for one in (None, {"method": "mtp", "num_speculative_tokens": count}))
    plain, _ = generate(without, InProcessExecutor(without), WISHES)
    results, steps = generate(drafting, InProcessExecutor(drafting), WISHES)
    assert_same(results, plain)
    print(family, steps)
