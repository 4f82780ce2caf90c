"""Tokens and logits through transformers' modules on our engine equal transformers' own, on tiny random checkpoints.

CI takes a sample of the architectures; `make acceptance` takes all, and the page names them.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor import create_executor
from app.engine.executor.base import Executor
from app.errors import UnsupportedError
from app.models.transformers_backend.linears import Siblings
from app.models.transformers_backend.mlp import HfMLP
from app.models.transformers_backend.norms import HfRMSNorm
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from tests import limits
from tests.engine.core_driver import assert_idle, run
from tests.engine.executor.forked_executor import ForkedExecutor
from tests.hf_logprobs import check_logprobs, prompts
from tests.models.families.test_families import all_logits
from tests.models.transformers_backend.architectures import ARCHITECTURES, FURTHER, REFUSED, page_table
from tests.rooms import ROOT
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

SAMPLE = random.Random(17).sample(sorted(ARCHITECTURES), 3)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
PARALLEL = ("llama", "mixtral", "starcoder2", "qwen2_moe", "cohere")


def sampled(names: list[str], sample: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in sample else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", sampled(sorted(ARCHITECTURES), SAMPLE))
def test_tokens_and_logits_equal_transformers(name: str) -> None:
    """In chunks, several requests at once."""
    directory = tiny_model(name, **ARCHITECTURES[name])
    judge, asked = hf_model(directory), prompts((3, 16, 37, 70))
    expected = [hf_greedy(judge, prompt, 8) for prompt in asked]
    assert len({tuple(tokens) for tokens in expected}) == len(asked), "the model says the same whatever it is asked"
    driver = Driver(str(directory), chunk=20, max_model_len=128, model_impl="transformers")
    assert [run.tokens for run in driver.run([Run(prompt, greedy(8)) for prompt in asked])] == expected
    with torch.inference_mode():
        exact = judge(torch.tensor([asked[-1]])).logits[0]
    assert (all_logits(driver, asked[-1]) - exact).abs().max() < 1e-3
    PASSED.add(name)


def engine_tokens(name: str, changes: dict[str, Any], executor: str, **options: Any) -> None:
    """Prompts of which some share a prefix, with so few blocks that requests are preempted; two steps in flight."""
    directory = tiny_model(name, **changes)
    judge, shared = hf_model(directory), prompts((40,))[0]
    asked = [*prompts((3, 16, 37, 60)), *(shared + one for one in prompts((5, 9, 20)))]
    config = EngineConfig(
        model=str(directory),
        model_impl="transformers",
        device="cpu",
        executor=executor,
        max_model_len=128,
        num_threads=1,
        step_timeout_s=limits.patience_s(),
        **{"block_size": 8, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 24, **options},
    )
    runs: Executor = ForkedExecutor(config) if executor == "local_processes" else create_executor(config)
    core = EngineCore(config, ModelInfo.of(config), runs, b"a secret for tests")
    try:
        core.start()
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=0)
        results = run(core, [EngineRequest(str(i), prompt, params) for i, prompt in enumerate(asked)])
        assert_idle(core)
        assert core.stats().figures["prefix_cache_hits"] > 0, "no prefix was found"
    finally:
        core.shutdown()
    assert [results.tokens[str(i)] for i in range(len(asked))] == [hf_greedy(judge, prompt, 8) for prompt in asked]


@pytest.mark.parametrize("name", sampled(sorted(ARCHITECTURES), SAMPLE[:1]))
def test_through_the_engine(name: str) -> None:
    engine_tokens(name, ARCHITECTURES[name], "in_process")


@pytest.mark.parametrize("name", sampled(list(PARALLEL), ["llama"]))
def test_over_two_ranks(name: str) -> None:
    engine_tokens(name, {**ARCHITECTURES[name], **HEADS}, "local_processes", tensor_parallel_size=2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "starcoder2", "mixtral", "deepseek_v3", "gemma4_text", "gpt_oss"])
def test_on_a_gpu(name: str) -> None:
    """Prompts in chunks, tokens from CUDA graphs where the step can be captured; logprobs beside transformers'."""
    # Its heads are wider than the kernels hold.
    options = {"attention_backend": "torch"} if name == "gemma4_text" else {}
    check_logprobs(tiny_model(name, **ARCHITECTURES[name]), "cuda", 2e-2, model_impl="transformers", **options)


def test_what_is_exchanged_and_deferred_in_llama() -> None:
    """A layer is two sums with their norms, one product for queries, keys and values, one rotation that also writes."""
    driver = Driver(str(tiny_model("llama", num_hidden_layers=3)), num_blocks=8, model_impl="transformers")
    assert driver.worker._parts is not None
    model: Any = driver.worker._parts.model
    modules = list(model.modules())
    assert sum(isinstance(module, Siblings) for module in modules) == 3
    outputs = [module for name, module in model.named_modules() if name.endswith("o_proj")]
    mlps = [module for module in modules if isinstance(module, HfMLP)]
    norms = [module for module in modules if isinstance(module, HfRMSNorm)]
    assert [module.site.tries for module in (*outputs, *mlps)] == [True] * 6
    # The first norm has no sum before it, the last no product behind it.
    assert [norm.may_defer for norm in norms] == [False, True, True, True, True, True, False]
    assert [layer.rotation.is_in_use for layer in model.attention_layers] == [True] * 3


def test_weights_are_replaced_in_place() -> None:
    """Experts, which the checkpoint holds one by one and the model stacked, too."""
    changes, asked = ARCHITECTURES["mixtral"], prompts((3, 16))
    before, after = (tiny_model("mixtral", seed=seed, **changes) for seed in (0, 1))
    driver = Driver(str(before), num_blocks=16, max_model_len=64, model_impl="transformers")
    driver.worker.check_weights(str(after))
    driver.worker.begin_update(True)
    driver.worker.load_directory(str(after))
    driver.worker.finish_update(True)
    judge = hf_model(after)
    found = driver.run([Run(prompt, greedy(6)) for prompt in asked])
    assert [run.tokens for run in found] == [hf_greedy(judge, prompt, 6) for prompt in asked]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_run_is_refused_in_one_line(name: str) -> None:
    changes, reason = REFUSED[name]
    directory = tiny_model(name, **changes)
    with pytest.raises(UnsupportedError, match=reason) as refusal:
        Driver(str(directory), num_blocks=8, model_impl="transformers")
    assert "\n" not in refusal.value.message


PASSED: set[str] = set()
PAGE = ROOT / "docs" / "models.md"
MARKS = "<!-- through transformers -->\n\n", "\n\n<!-- end -->"


def page_with(table: str) -> str:
    head, _, rest = PAGE.read_text().partition(MARKS[0])
    return head + MARKS[0] + table + MARKS[1] + rest.partition(MARKS[1])[2]


def test_the_page_names_what_is_checked() -> None:
    assert PAGE.read_text() == page_with(page_table(FURTHER))


@pytest.mark.slow
def test_the_page_is_written() -> None:
    """Behind all architectures of this file: the table of those that passed."""
    assert set(FURTHER) <= PASSED, sorted(set(FURTHER) - PASSED)
    PAGE.write_text(page_with(page_table(FURTHER)))
