"""Drafters in captured steps: in fp32 the tokens are those without drafts, with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from tests.engine.core_driver import KEY, make_request, run
from tests.hf_logprobs import prompts
from tests.models.families.test_state_families import directory_of
from tests.tiny_models import hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.mtp_checkpoints import SHAPES, with_layer_behind
from tests.worker.spec_decode.test_chain import MADE, SHAPE
from tests.worker.spec_decode.test_drafting import WISHES, WholeLogprobs, assert_same, generate

pytestmark = pytest.mark.gpu
METHODS = ("eagle3", "draft_model", "ngram", "suffix", "eagle", "medusa", "mlp", "dflash", "dflash2", "dspark")
STATES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # families whose layers keep some: their own runs are below


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
    if name in ("ngram", "suffix"):
        speculation |= {"prompt_lookup_min": 1} if name == "ngram" else {}
    elif name in ("dflash", "dflash2", "dspark"):
        drafters.block(tmp_path, hf_model(directory), name)
        speculation |= {"method": name.removesuffix("2"), "model": str(tmp_path)}
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
@pytest.mark.parametrize("family", [family for family in SHAPES if family not in STATES])
def test_tokens_are_those_without_the_models_own_layer(tmp_path: Path, family: str, count: int | None) -> None:
    model = with_layer_behind(family, tmp_path)[0]
    without, drafting = (config_of(model, one) for one in (None, {"method": "mtp", "num_speculative_tokens": count}))
    plain, _ = generate(without, InProcessExecutor(without), WISHES)
    results, steps = generate(drafting, InProcessExecutor(drafting), WISHES)
    assert_same(results, plain)
    print(family, steps)


def answers(model: Path, speculation: dict[str, Any] | None) -> tuple[dict[str, list[int]], int]:
    """Tokens of prompts that repeat themselves, some greedy, some sampled; how many drafts there were."""
    config = config_of(model, speculation).model_copy(update={"num_blocks": None})
    core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
    core.start()
    try:
        asked = [
            make_request(str(i), prompt * 3, max_tokens=20, temperature=0.0 if i % 2 else 0.8, seed=i, ignore_eos=True)
            for i, prompt in enumerate(prompts((6, 9, 14, 20)))
        ]
        return run(core, asked).tokens, int(core.stats().figures["draft_tokens"])
    finally:
        core.shutdown()


@pytest.mark.parametrize("count", [3, None])
@pytest.mark.parametrize("family", STATES)
def test_tokens_of_layers_with_states_are_those_without_the_models_own_layer(
    tmp_path: Path, family: str, count: int | None
) -> None:
    model = with_layer_behind(family, tmp_path)[0]
    found, num_drafts = answers(model, {"method": "mtp", "num_speculative_tokens": count})
    assert found == answers(model, None)[0]
    assert num_drafts > 0


@pytest.mark.parametrize(
    "name", ["qwen3_5", "mamba", "mamba2", "bamba", "kimi_linear", "lfm2", "minimax", "falcon_h1", "nemotron_h"]
)
def test_tokens_of_layers_with_states_are_those_without_n_grams(name: str) -> None:
    model = directory_of(name)
    found, num_drafts = answers(model, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})
    assert found == answers(model, None)[0]
    assert num_drafts > 0


@pytest.mark.parametrize("name", ["eagle3", "draft_model"])
def test_prefixes_back_from_the_host_bring_a_drafters_keys(directory: Path, tmp_path: Path, name: str) -> None:
    """Rows get their prefixes while others draft; a second time all come back, as the device holds a few of them."""
    speculation: dict[str, Any] = {"method": name, "num_speculative_tokens": 3, "model": str(directory)}
    if name == "eagle3":
        MADE[name][1](tmp_path, hf_model(directory))
        speculation["model"] = str(tmp_path)

    def told(wanted: dict[str, Any] | None) -> tuple[list[dict[str, list[int]]], int]:
        config = config_of(directory, wanted).model_copy(update={"kv_host_memory_bytes": 64 << 20})
        core = EngineCore(config, ModelInfo.from_directory(config.model), InProcessExecutor(config), KEY)
        core.start()
        try:
            found = []
            for turn in range(2):
                asked = [
                    make_request(f"{turn} {i}", prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
                    for i, prompt in enumerate(prompts((40, 44, 48, 52, 56, 60)))
                ]
                results = run(core, asked)
                found.append({request[2:]: tokens for request, tokens in results.tokens.items()})
            assert all((output.num_cached_tokens or 0) >= 32 for output in results.final.values())
            return found, int(core.stats().figures.get("draft_tokens", 0))
        finally:
            core.shutdown()

    plain, (found, num_drafts) = told(None)[0], told(speculation)
    assert found == plain
    assert plain[0] == plain[1]
    assert num_drafts > 0
