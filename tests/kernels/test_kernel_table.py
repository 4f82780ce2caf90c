"""Kernels are chosen when something is built for a device: a step looks nothing up."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch

from app.kernels.fused import FUSED_OPS, reference, triton_ops
from app.kernels.kernel_table import KernelTable
from app.platforms import platform_of
from app.records.sampling_params import SamplingParams
from app.records.step import SchedulerOutput
from app.registry import Registry, load_entry
from app.worker.rows.pending_step import PendingStep
from tests.kernels.stub_gpu import as_on
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, Run, greedy

LOOK_UPS = (platform_of, Registry.load, KernelTable.on, KernelTable.all_on, load_entry)
CODES = {look_up.__code__ for look_up in LOOK_UPS}
PROMPTS = [[5, 6, 7, 8, 9, 10], [9, 10, 11]]
WANTED = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "allowed_token_ids": list(range(3, 300)), "seed": 4}


def look_ups_of_steps(model: str, params: SamplingParams, **options: Any) -> list[Counter[str]]:
    """What each step looked up, and where, from its message to its pending output."""
    driver = Driver(model, num_blocks=64, **options)
    runner, found = driver.worker._runner, []
    assert runner is not None
    execute = runner.execute

    def counted(step: SchedulerOutput) -> PendingStep:
        seen: Counter[str] = Counter()

        def count(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code in CODES and frame.f_back is not None:
                seen[f"{frame.f_code.co_name} in {frame.f_back.f_code.co_filename}"] += 1

        sys.setprofile(count)
        try:
            return execute(step)
        finally:
            sys.setprofile(None)
            found.append(seen)

    runner.execute = counted  # type: ignore[method-assign]
    driver.run([Run(prompt, params) for prompt in PROMPTS])
    return found


@pytest.mark.parametrize("quantization", [None, "fp8", "int8"])
def test_steps_of_a_dense_model_look_nothing_up(quantization: str | None) -> None:
    model = str(tiny_model("llama", hidden_size=128, intermediate_size=256))
    found = look_ups_of_steps(model, greedy(4), quantization=quantization)
    assert found == [Counter()] * 5


@pytest.mark.parametrize("variant", ["deepseek_v3", "gpt_oss"])
def test_steps_of_latent_attention_and_experts_look_nothing_up(variant: str) -> None:
    family, changes = EXPERT_VARIANTS[variant]
    found = look_ups_of_steps(str(tiny_model(family, **changes)), SamplingParams(**WANTED, max_tokens=4))
    assert found == [Counter()] * 5


def test_the_device_chooses() -> None:
    assert FUSED_OPS.on(torch.device("meta")) is FUSED_OPS.on(torch.device("cpu")) is reference.OPS
    for generation in (0, 8, 9):
        with as_on(generation):
            assert FUSED_OPS.on(torch.device("cpu")) is triton_ops.OPS
