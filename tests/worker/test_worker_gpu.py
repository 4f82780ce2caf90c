"""The worker on a real GPU: tokens as transformers', outputs a step late, memory measured."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.config.engine import EngineConfig
from app.records.request import EngineRequest
from app.records.step import NewRequest, SchedulerOutput
from app.worker.worker import Worker
from tests.tiny_models import hf_greedy, hf_model, tiny_model
from tests.worker.worker_driver import greedy

pytestmark = pytest.mark.gpu
PROMPTS = [[random.Random(i).randrange(3, 331) for _ in range(20 + 9 * i)] for i in range(4)]


def start(**options: Any) -> tuple[Worker, str]:
    directory = str(tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=32))
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_blocks": 64, "max_num_seqs": 8}
    worker = Worker(EngineConfig(model=directory, **{**defaults, **options}))
    return worker, directory


def step_messages(steps: int) -> list[SchedulerOutput]:
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    requests = [
        NewRequest(
            i,
            np.array(p, dtype=np.int32),
            len(p),
            0,
            list(range(8 * i, 8 * i + 8)),
            EngineRequest("r", [], greedy(50)),
            (),
        )
        for i, p in enumerate(PROMPTS)
    ]
    counts = np.array([len(prompt) for prompt in PROMPTS], dtype=np.int32)
    samples = np.ones(len(PROMPTS), dtype=np.bool_)
    ones = np.ones(len(PROMPTS), dtype=np.int32)
    first = SchedulerOutput(0, rows, counts, samples, new_requests=requests)
    return [first, *(SchedulerOutput(i, rows, ones, samples) for i in range(1, steps))]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tokens_and_lag(backend: str) -> None:
    worker, directory = start(attention_backend=backend)
    worker.start()
    reference = hf_model(Path(directory))
    outputs = []
    for i, step_message in enumerate(step_messages(12)):
        returned = worker.execute(step_message)
        assert [output.step_id for output in returned] == ([] if i == 0 else [i - 1])
        outputs += returned
    nothing = np.zeros(0, dtype=np.int32)
    outputs += worker.execute(SchedulerOutput(12, nothing, nothing, nothing.astype(bool), flush=True))
    assert [output.step_id for output in outputs] == list(range(13))
    assert all(output.step_time_s > 0 for output in outputs[:12])
    for i, prompt in enumerate(PROMPTS):
        assert [int(output.sampled_token_ids[i]) for output in outputs[:12]] == hf_greedy(reference, prompt, 12)
    worker.shutdown()


def test_memory_is_measured() -> None:
    # Wide keys and values: with tiny ones the worker stops at its largest number of blocks, not at the memory's share.
    wide = tiny_model("qwen3", num_attention_heads=32, num_key_value_heads=32, head_dim=128)
    config = EngineConfig(model=str(wide), device="cuda", dtype="float32", max_num_seqs=8, gpu_memory_utilization=0.3)
    worker = Worker(config)
    info = worker.start()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert 0.2 < (total - free) / total < 0.32
    assert info.num_blocks * 16 >= 512
    assert any(note.startswith("attention: triton (GPU") for note in info.notes)  # then why not others
    worker.shutdown()
