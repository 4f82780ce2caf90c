"""Quantized checkpoints over two processes: each rank reads, packs and multiplies its own share, and the sums meet.

The judge is transformers with the numbers that are stored. CI takes one form, drawn by a seed; `make acceptance` takes
all of Llama, and all that a family with experts may come in, in every layout.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.base import Executor
from app.engine.executor.in_process import InProcessExecutor
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import TokenLogprobs
from tests import limits
from tests.engine.core_driver import KEY, assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.hf_logprobs import errors_of, prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.models.families.test_expert_families_in_parallel import EXPERT_LAYOUTS
from tests.quantization.stored_forms import FORMS, LLAMA, PLAIN_FORMS, llama
from tests.quantization.test_mxfp4 import mxfp4_model
from tests.tiny_models import hf_model, tiny_model

TWO = EXPERT_LAYOUTS["tp2"]
EXACT = 1e-3
NOISE = 0.01  # of activations that each rank rounds by a scale of its own share: a gate may choose otherwise
ROUNDED = 0.3  # what roundings of 8 bits make of such models' logprobs, on average
SAMPLE = random.Random(18).sample(sorted(FORMS), 1)
FAMILIES = {
    "qwen3_moe": {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 160},
    "mixtral": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160},
    "deepseek_v3": {
        **{"intermediate_size": 160, "moe_intermediate_size": 160},
        **{"q_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 16},
    },
}
MIXED_LAYOUTS = {
    **EXPERT_LAYOUTS,
    "eplb2": {
        **{**EXPERT_LAYOUTS["ep2"], "enable_eplb": True, "num_redundant_experts": 1},
        **{"eplb_window_size": 2, "eplb_step_interval": 3},  # experts move as answers go on
    },
}
MIXED = [
    (family, form, layout)
    for family in FAMILIES
    for form in PLAIN_FORMS
    for layout in MIXED_LAYOUTS
    if (family, layout) != ("mixtral", "eplb2")  # whose few experts are even enough to stay
]
MIXED_SAMPLE = [("deepseek_v3", "fp8-block", "ep2")]


@dataclass
class Answer:
    """With `RequestOutput`'s names."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]

    @property
    def outputs(self) -> list[Answer]:
        return [self]


def errors(directory: Path, judge: Path, quantization: str | None = None, **layout: Any) -> tuple[float, float]:
    """See `logprob_errors`."""
    config = EngineConfig(
        model=str(directory), device="cpu", max_model_len=128, num_threads=1, block_size=8, num_blocks=64,
        max_num_seqs=4, max_num_batched_tokens=32, step_timeout_s=limits.patience_s(),
        executor="local_processes" if layout else "in_process", quantization=quantization, **layout,
    )  # fmt: skip
    executor: Executor = ForkedExecutor(config) if layout else InProcessExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(config.model), executor, KEY)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0, logprobs=0, prompt_logprobs=0)
    asked = prompts((3, 16, 37))
    try:
        core.start()
        results = run(core, [EngineRequest(str(i), prompt, params) for i, prompt in enumerate(asked)])
        assert_idle(core)
        assert (core.stats().figures["experts_moved"] > 0) == ("enable_eplb" in layout)
    finally:
        core.shutdown()
    names = map(str, range(len(asked)))
    answers = [Answer(results.tokens[i], results.logprobs[i], results.prompt_logprobs[i]) for i in names]
    return errors_of(hf_model(judge), asked, answers)


def check(
    directory: Path, rounds: bool, layout: dict[str, Any], judge: Path | None = None, quantization: str | None = None
) -> None:
    """As near to the judge as one process is."""
    judge = judge or directory.parent / "judge"
    largest, mean = errors(directory, judge, quantization=quantization, **layout)
    if not rounds:
        assert largest < EXACT
        return
    _, alone = errors(directory, judge, quantization=quantization)
    assert alone < ROUNDED, alone
    assert mean < 2 * alone + NOISE, (mean, alone)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in SAMPLE else pytest.mark.slow) for form in FORMS]
)
def test_logprobs_are_those_of_what_is_stored(form: str, tmp_path: Path) -> None:
    check(FORMS[form].write(llama(form), tmp_path), FORMS[form].rounds, TWO)


@pytest.mark.parametrize(
    ("family", "form", "layout"),
    [pytest.param(*one, marks=() if one in MIXED_SAMPLE else pytest.mark.slow, id="-".join(one)) for one in MIXED],
)
def test_experts_and_latent_attention(family: str, form: str, layout: str, tmp_path: Path) -> None:
    kind, changes = EXPERT_VARIANTS[family]
    source = tiny_model(kind, **{**changes, "initializer_range": 0.1, **FAMILIES[family]})
    check(FORMS[form].write(source, tmp_path), FORMS[form].rounds, MIXED_LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_of_gpt_oss_as_published(layout: str, tmp_path: Path) -> None:
    check(mxfp4_model(tmp_path / "model"), False, EXPERT_LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["k", "old", "small", "tables"])
def test_gguf(mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gguf_models import write_gguf
    from tests.quantization.test_gguf import SIZES, types

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", **SIZES), file, "llama", types(mix)).save_pretrained(tmp_path / "judge")
    check(file, False, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3moe-fused", "gpt-oss", "deepseek2-v3"])
def test_experts_of_gguf(family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.checkpoints.gguf.test_expert_families import write

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write(family, file).save_pretrained(tmp_path / "judge")
    check(file, False, EXPERT_LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nemotron_h-experts", "falcon_h1", "granite_hybrid"])
def test_states_of_gguf(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection of five parts, each of which is split."""
    from tests.checkpoints.gguf.test_space_families import write

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write(file, family, num_key_value_heads=2).save_pretrained(tmp_path / "judge")
    check(file, False, TWO)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int8", "w4"])
@pytest.mark.parametrize(("family", "layout"), [("llama", "tp2"), ("qwen3_moe", "tp2"), ("qwen3_moe", "ep2")])
def test_weights_that_are_rounded_while_loading(family: str, quantization: str, layout: str) -> None:
    """Each rank rounds its share: of 128 inputs a group, for few bits."""
    kind, changes = EXPERT_VARIANTS.get(family, ("llama", LLAMA))
    wide = {"hidden_size": 128, "initializer_range": 0.05}
    directory = tiny_model(kind, **{**changes, **FAMILIES.get(family, {}), **wide})
    check(directory, True, EXPERT_LAYOUTS[layout], directory, quantization)
