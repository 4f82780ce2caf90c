"""Experts, latent attention and quantized checkpoints over two ranks on GPUs, with captured decode steps: transformers'
logprobs. `python -m tests.engine.executor.test_experts_on_gpus` tries all of it on a CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from app import LLM, SamplingParams
from app.checkpoints.model_info import ASSETS
from tests.hf_logprobs import errors_of, logprob_errors, prompts
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.quantization.stored_forms import PLAIN_FORMS, llama
from tests.quantization.test_mxfp4 import mxfp4_model
from tests.tiny_models import hf_model, tiny_model

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"hidden_size": 256, "intermediate_size": 320, "head_dim": 64, "initializer_range": 0.05}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "pp2": {"pipeline_parallel_size": 2},
}
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
WITHIN = 2e-2  # fp32 through kernels that multiply in TF32
# Experts and latent attention, quantized: (family, form, layout).
QUANTIZED_EXPERTS = [
    ("qwen3_moe", "w4-words", "ep2"),
    ("qwen3_moe", "gptq-4", "tp2"),
    ("deepseek_v3", "fp8-block", "tp2"),
    ("deepseek_v3", "fp8-block", "ep2"),
]
NOISE = 0.02  # between the logprobs of one rank and of two, on average: bf16, and activations in 8 bits


def graphs(device: str) -> dict[str, Any]:
    """Engine options of a device."""
    return {"cuda_graphs": "on"} if device == "cuda" else {"num_threads": 1}


def check_family(family: str, layout: str, device: str = "cuda", **more: Any) -> None:
    kind, changes = EXPERT_VARIANTS[family]
    heads = {} if "kv_lora_rank" in changes else HEADS
    largest, _ = logprob_errors(
        tiny_model(kind, **{**changes, **heads}), device, **LAYOUTS[layout], **graphs(device), **more
    )
    assert largest < WITHIN, largest


def check_stored(directory: Path, layout: str, device: str) -> None:
    """Two ranks are as near to the numbers that are stored as one is, in the types that kernels are for."""
    options = {"dtype": "bfloat16" if device == "cuda" else "float32", "judge": directory.parent / "judge"}
    _, alone = logprob_errors(directory, device, **options, **graphs(device))
    _, mean = logprob_errors(directory, device, **options, **graphs(device), **LAYOUTS[layout])
    print(f"{directory.parent.name} {layout}: one {alone:.4f}, two {mean:.4f}")
    assert alone < 0.2, alone
    assert mean < 1.5 * alone + NOISE, (mean, alone)


def check_form(form: str, folder: Path, device: str = "cuda") -> None:
    check_stored(PLAIN_FORMS[form].write(llama(form, **WIDE), folder), "tp2", device)


def check_quantized_experts(family: str, form: str, layout: str, folder: Path, device: str = "cuda") -> None:
    kind, changes = EXPERT_VARIANTS[family]
    latent = {"q_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 16} if "kv_lora_rank" in changes else HEADS
    wide = {"intermediate_size": 160, "moe_intermediate_size": 160, "initializer_range": 0.1}
    directory = PLAIN_FORMS[form].write(tiny_model(kind, **{**changes, **latent, **wide}), folder)
    check_stored(directory, layout, device)


def check_moves(sums: str, device: str = "cuda") -> None:
    """Experts move beside steps that are replayed, as answers go on; the same questions have the same answers."""
    kind, changes = EXPERT_VARIANTS["qwen3_moe"]
    directory, asked = tiny_model(kind, **{**changes, **HEADS}), prompts((3, 16, 37, 60))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    options: dict[str, Any] = {
        "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_blocks": 64,
        "enable_eplb": True, "num_redundant_experts": 1, "eplb_window_size": 5, "eplb_step_interval": 15,
        "enable_prefix_caching": False,
    }  # fmt: skip
    options |= {**LAYOUTS["ep2"], **graphs(device), "small_all_reduce": sums, "device": device}
    with LLM(str(directory), tokenizer=str(ASSETS / "tiny-chat"), **options) as llm:
        rounds, moved = [], []
        for _ in range(4):
            rounds.append(llm.generate(asked, params, use_tqdm=False))
            moved.append(llm._core.stats().figures["experts_moved"])
    assert moved[0] > 0, "nothing was moved"
    tokens = [[list(answer.outputs[0].token_ids) for answer in answers] for answers in rounds]
    assert tokens[1:] == tokens[:-1], moved
    assert errors_of(hf_model(directory), asked, rounds[-1])[0] < WITHIN


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, layout: str) -> None:
    check_family(family, layout)


@pytest.mark.usefixtures("one_gpu")
def test_sums_through_the_library_in_graphs() -> None:
    check_family("qwen3_moe", "ep2", small_all_reduce="nccl")


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("sums", ["nccl", "symmetric_memory"])
def test_experts_that_move_change_no_token(sums: str) -> None:
    check_moves(sums)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("form", PLAIN_FORMS)
def test_quantized_checkpoints(form: str, tmp_path: Path) -> None:
    check_form(form, tmp_path)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("family", "form", "layout"), QUANTIZED_EXPERTS)
def test_quantized_experts(family: str, form: str, layout: str, tmp_path: Path) -> None:
    check_quantized_experts(family, form, layout, tmp_path)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("layout", ["tp2", "ep2"])
def test_gpt_oss_as_published(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    check_stored(mxfp4_model(tmp_path / "model"), layout, "cuda")


if __name__ == "__main__":
    check_moves("auto", "cpu")
    check_family("deepseek_v2", "ep2", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        check_form("gptq-4-act-order", Path(folder) / "gptq", "cpu")
        check_quantized_experts("deepseek_v3", "fp8-block", "ep2", Path(folder) / "experts", "cpu")
        check_stored(mxfp4_model(Path(folder) / "oss" / "model"), "tp2", "cpu")
