"""Drafters with weights: their drafts are those of plain references, and tokens those of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.in_process import InProcessExecutor
from app.engine.scheduler.draft_lengths import DraftLengths
from app.errors import UnsupportedError
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.worker.spec_decode.base import Proposal
from app.worker.warmup.dummy_step import launch_static
from tests.engine.core_driver import KEY, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.spec_decode import drafters
from tests.worker.spec_decode.drafters import Drafts
from tests.worker.spec_decode.mtp_checkpoints import SHAPES, with_layer_behind
from tests.worker.worker_driver import Driver, Run, decode_statically, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT, MAX_TOKENS = 4, 14
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
}
# Each writes a checkpoint into a folder and gives its reference.
MADE: dict[str, tuple[str, Callable[[Path, PreTrainedModel], Drafts]]] = {
    "eagle3": ("eagle3", drafters.eagle3),
    "eagle3-speculators": ("eagle3", lambda folder, target: drafters.eagle3(folder, target, "speculators", [0, 3, 5])),
    "eagle3-norms": ("eagle3", lambda folder, target: drafters.eagle3(folder, target, "norms")),
    "eagle": ("eagle", drafters.eagle),
    "eagle-without-bias": ("eagle", lambda folder, target: drafters.eagle(folder, target, has_bias=False)),
    "medusa": ("medusa", drafters.medusa),
    "medusa-fewer-tokens": ("medusa", lambda folder, target: drafters.medusa(folder, target, "vllm")),
    "mlp": ("mlp_speculator", drafters.mlp_speculator),
    "mlp-tied": ("mlp_speculator", lambda folder, target: drafters.mlp_speculator(folder, target, tied=True)),
}


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny_model("llama", **SHAPE)


@pytest.fixture(scope="module")
def target(directory: Path) -> PreTrainedModel:
    return hf_model(directory)


def config_of(model: Path, speculation: dict[str, Any] | None, **options: Any) -> EngineConfig:
    sizes = {"max_model_len": 96, "block_size": 4, "num_blocks": 200, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    sizes |= {"executor": "in_process", "speculative_config": speculation, **options}
    return EngineConfig(model=str(model), device="cpu", num_threads=1, **sizes)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 331, length).tolist() for length in (1, 7, 30, 61)]


class Spy:
    """Keeps what a proposer proposed, and for which texts."""

    def __init__(self, proposer: Any) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []
        self._propose = proposer.propose
        proposer.propose = self

    def __call__(self, proposal: Proposal) -> torch.Tensor:
        drafts, columns = self._propose(proposal), proposal.columns
        is_real = (proposal.view.tensors.slots[proposal.ends] >= 0).tolist()  # others pad a static step
        for row, own in compress(zip(proposal.rows.tolist(), drafts.tolist(), strict=True), is_real):
            known = int(columns.num_tokens[row])
            if not own:
                continue
            self.seen.append((columns.flat_token_ids[row * columns.width :][:known].tolist(), own))
        return drafts


def run_greedy(
    config: EngineConfig,
    *,
    static: bool = False,
    asked: list[list[int]] | None = None,
    lengths: DraftLengths | None = None,
) -> tuple[list[list[int]], Spy]:
    """The answers to what is asked, or to all prompts, and what was proposed; `lengths`: how many drafts steps have."""
    asked = asked or prompts()
    executor = InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    core.start()
    if lengths is not None:
        core.scheduler._drafts = lengths
    worker = executor._worker
    assert worker is not None
    assert worker._runner is not None
    spy = Spy(worker._runner._head._drafting.proposer)  # type: ignore[attr-defined]
    if static:
        decode_statically(worker, [1, 2, 4])
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
    results = run(core, [EngineRequest(f"{n}", p, params, choice_index=n) for n, p in enumerate(asked)])
    core.shutdown()
    return [results.tokens[f"{n}"] for n in range(len(asked))], spy


def assert_drafts(spy: Spy, reference: Drafts, count: int) -> None:
    """All that may become tokens; of a request's first drafts the first alone, as there may be no blocks yet to draft
    further in."""
    num_checked = 0
    for known, own in spy.seen:
        prompt = max((p for p in prompts() if known[: len(p)] == p), key=len)
        left = len(prompt) + MAX_TOKENS - len(known)
        checked = min(left, 1 if len(known) == len(prompt) + 1 else count)
        assert own[:checked] == reference(known, count)[:checked], len(known)
        num_checked += checked
    assert num_checked > 10 * count


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_drafts_are_those_of_the_reference(
    directory: Path, target: PreTrainedModel, tmp_path: Path, name: str, static: bool
) -> None:
    """Chunked prompts, several rows, steps with and without drafts."""
    method, make = MADE[name]
    reference = make(tmp_path, target)
    drafting = {"method": method, "model": str(tmp_path), "num_speculative_tokens": COUNT}
    answers, spy = run_greedy(config_of(directory, drafting), static=static)
    assert answers == [hf_greedy(target, prompt, MAX_TOKENS) for prompt in prompts()]
    assert_drafts(spy, reference, COUNT)


@pytest.mark.parametrize("static", [False, True])
def test_drafts_of_a_language_model(directory: Path, target: PreTrainedModel, static: bool) -> None:
    draft = tiny_model("qwen2", seed=4, num_attention_heads=2, num_key_value_heads=1)
    drafting = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": COUNT}
    answers, spy = run_greedy(config_of(directory, drafting), static=static)
    assert answers == [hf_greedy(target, prompt, MAX_TOKENS) for prompt in prompts()]
    assert_drafts(spy, drafters.draft_model(hf_model(draft)), COUNT)


@pytest.mark.parametrize(("number", "family"), list(enumerate([*SHAPES, "nemotron_h"])))
def test_a_layer_behind_the_last_drafts(tmp_path: Path, number: int, family: str) -> None:
    """Each family that has one, over static tensors and in ordinary steps in turn."""
    static = number % 2 == 0
    model, alone, reference = with_layer_behind(family, tmp_path)
    answers, spy = run_greedy(config_of(model, {"method": "mtp", "num_speculative_tokens": COUNT}), static=static)
    assert answers == [hf_greedy(alone, prompt, MAX_TOKENS) for prompt in prompts()]
    assert_drafts(spy, reference, COUNT)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "glm4_moe", "deepseek_v3", "nemotron_h"])
def test_steps_without_a_token_fill_the_cache(
    directory: Path, target: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    """A prompt in many chunks, alone: the drafts behind it attend to all of it."""
    if name in MADE:
        model, reference = directory, MADE[name][1](tmp_path, target)
        drafting = {"method": name, "model": str(tmp_path)}
    else:
        model, _, reference = with_layer_behind(name, tmp_path)
        drafting = {"method": "mtp"}
    config = config_of(model, drafting | {"num_speculative_tokens": COUNT}, max_num_batched_tokens=8)
    _, spy = run_greedy(config, asked=prompts()[3:])
    assert_drafts(spy, reference, COUNT)


@pytest.mark.parametrize("name", ["eagle3", "eagle", "mlp", "medusa", "draft_model"])
def test_tokens_of_kernels_that_did_not_run_hurt_nobody(
    directory: Path, target: PreTrainedModel, tmp_path: Path, name: str
) -> None:
    """While a start compiles kernels ahead, what they would have written is any memory: ids that no token has."""
    asked: dict[str, Any] = {"method": name, "model": str(directory), "num_speculative_tokens": COUNT}
    if name != "draft_model":
        MADE[name][1](tmp_path, target)
        asked |= {"method": MADE[name][0], "model": str(tmp_path)}
    driver = Driver(str(directory), num_blocks=32, max_model_len=96, max_num_seqs=4, speculative_config=asked)
    step = decode_statically(driver.worker, [1, 4])
    proposer: Any = step._drafting.proposer  # type: ignore[union-attr]

    def any_memory(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((len(logits),), 1 << 30), torch.zeros(len(logits))

    step._sample_tokens = proposer._sampler._sample_tokens = any_memory  # type: ignore[assignment]
    with torch.inference_mode():
        for _ in range(2):
            launch_static(step)
    assert driver.run([Run([5, 9, 200], greedy(6))])[0].tokens


@pytest.mark.parametrize("kinds", [["moe", "full_attention"], ["full_attention"]])
def test_other_blocks_behind_nemotron_h_are_refused_by_name(tmp_path: Path, kinds: list[str]) -> None:
    model = with_layer_behind("nemotron_h", tmp_path)[0]
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "mtp_layers_block_type": kinds}))
    with pytest.raises(UnsupportedError, match=r"mtp_layers_block_type=.* is not supported; known: attention, experts"):
        run_greedy(config_of(model, {"method": "mtp", "num_speculative_tokens": COUNT}))
