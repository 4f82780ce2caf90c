"""`deterministic: batch` on a CPU, family by family: steps are made of operations that look at no neighbour, give
transformers' tokens, and have the same bits alone, among others and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.kernels.gemm import onednn
from app.layers.epilogue import Act
from app.worker.exact_limits import SHOWN
from tests.models.families.test_against_transformers import prompts
from tests.models.families.test_families import GPT2
from tests.quantization.checkpoints import HEADS, write
from tests.quantization.test_gptq import SCHEME, gptq
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.exact_models import EXACT_MODELS, FAMILIES
from tests.worker.exact_operations import watched
from tests.worker.test_exact_steps import DTYPES, alone, assert_same, together
from tests.worker.worker_driver import Driver, Run, all_logits, greedy

NUM_TOKENS = 4
WIDE_GPT2 = {**GPT2, "hidden_size": 512, "n_embd": 512, "n_inner": 512}


@pytest.mark.parametrize("model", EXACT_MODELS)
def test_operations_and_tokens(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = EXACT_MODELS[model]()
    asked = prompts(3, (3, 16, 37))
    with watched(monkeypatch) as watch:
        driver = Driver(str(directory), deterministic="batch", max_model_len=64)
        runs = driver.run([Run(prompt, greedy(NUM_TOKENS)) for prompt in asked])
    assert watch.num_seen
    assert not watch.refused
    if isinstance(directory, Path):
        judge = hf_model(directory)
        assert [run.tokens for run in runs] == [hf_greedy(judge, prompt, NUM_TOKENS) for prompt in asked]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", FAMILIES)
def test_among_others_and_in_chunks(model: str, dtype: str) -> None:
    assert_same(together(model, dtype)[0], alone(model, dtype))
    assert_same(together(model, dtype, max_num_batched_tokens=7, max_num_seqs=7)[0], alone(model, dtype))


@pytest.mark.parametrize(
    ("model", "quantization", "dtype"),
    [("tiny-chat", "int8", "bfloat16"), ("tiny-chat", "w4", "bfloat16"), ("qwen3_moe", "fp8", "float32")],
)
def test_rounded_weights(model: str, quantization: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with watched(monkeypatch) as watch:
        found = together(model, dtype, quantization=quantization, max_num_batched_tokens=64)[0]
    assert not watch.refused
    assert_same(found, alone(model, dtype, quantization=quantization))


@pytest.mark.parametrize(
    ("family", "changes", "quantization"),
    [("gpt2", WIDE_GPT2, None), ("phi", {"hidden_size": 512, "intermediate_size": 512}, None), ("gpt2", GPT2, "int8")],
)
def test_packed_weights_without_a_gate(
    family: str, changes: dict[str, Any], quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights large enough to be packed, and rounded ones of any size: an activation of its own follows."""
    directory = tiny_model(family, num_hidden_layers=1, **changes)
    options: dict[str, Any] = {"deterministic": "batch", "max_model_len": 64, "quantization": quantization}
    prompt = prompts(3, (37,))[0]
    with monkeypatch.context() as patch, watched(patch) as watch:
        after = _counted(patch)
        whole, cut = Driver(str(directory), **options), Driver(str(directory), chunk=5, **options)
        assert torch.equal(all_logits(whole, prompt), all_logits(cut, prompt))
    assert not watch.refused
    assert after or not onednn.works(torch.float32)


def _counted(patch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the products that an activation follows alone, as they come."""
    shapes: list[torch.Size] = []
    act = Act.after

    def after(self: Act, y: torch.Tensor) -> torch.Tensor:
        shapes.append(y.shape)
        return act(self, y)

    patch.setattr(Act, "after", after)
    return shapes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_checkpoint_with_a_packed_head(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ, its inputs in an order of their own: logits in chunks of any size, and a plain model's tokens."""
    source = tiny_model("llama", vocab_size=352, intermediate_size=160, **HEADS)
    scheme = {**SCHEME, "lm_head": True, "desc_act": True}
    directory = write(source, tmp_path, gptq(act_order=True), scheme, linear=r"(_proj|lm_head)\.weight$")
    asked = prompts(3, (3, 16, 37))
    options: dict[str, Any] = {"deterministic": "batch", "dtype": dtype, "max_model_len": 64}
    with watched(monkeypatch) as watch:
        whole, cut = Driver(str(directory), **options), Driver(str(directory), chunk=5, **options)
        runs = cut.run([Run(prompt, greedy(NUM_TOKENS)) for prompt in asked])
        assert torch.equal(all_logits(whole, asked[2]), all_logits(cut, asked[2]))
    assert not watch.refused
    if dtype == "float32":
        judge = hf_model(tmp_path / "judge")
        assert [run.tokens for run in runs] == [hf_greedy(judge, prompt, NUM_TOKENS) for prompt in asked]


def test_each_architecture_is_compared() -> None:
    def of(models: object) -> set[str]:
        assert isinstance(models, dict)
        return {ModelInfo.from_directory(str(make())).architecture for make in models.values()}

    assert of(EXACT_MODELS) == SHOWN


def test_an_operation_that_looks_at_its_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option steps are full of them."""
    with watched(monkeypatch) as watch:
        Driver(str(EXACT_MODELS["gemma2"]()), max_model_len=64).run([Run([5, 6, 7], greedy(2))])
    assert {name.partition(" ")[0] for name in watch.refused} >= {"linear", "gelu", "tanh"}
