"""Which groups a model's layers form, and how many requests of the Gemma 3 27B shape that lets one GPU hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.distributed.parallel_groups import ParallelGroups
from app.engine.core import EngineCore
from app.layers.context import BuildContext
from app.models.families.gemma3 import Gemma3ForCausalLM
from app.records.step import ModelRunnerOutput, SchedulerOutput
from app.records.worker_info import WorkerInfo
from app.worker.attention.backend import select_attention
from app.worker.attention.kv_cache import KVCacheSpec
from app.worker.kv_group_choice import select_groups
from app.worker.kv_sizing import describe, size_kv_cache
from tests.engine.core_driver import KEY, make_request
from tests.engine.fake_executor import FakeExecutor

CPU = torch.device("cpu")
LENGTH = 32_768
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
}
KV_BYTES = 68 << 30  # about what an H200 has left beside the weights


class Instant(FakeExecutor):
    """Says token 1 to everything, and looks at nothing."""

    def __init__(self, info: WorkerInfo) -> None:
        super().__init__(1)
        self.info = info

    def execute(self, step_message: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(step_message.step_id, np.ones(int(step_message.samples.sum()), np.int32))


def context() -> BuildContext:
    return BuildContext(torch.bfloat16, CPU, LENGTH, select_attention("torch", CPU)[0], ParallelGroups())


def spec_of(config: EngineConfig) -> KVCacheSpec:
    """By the real model's layers, without their weights."""
    model = Gemma3ForCausalLM(context(), ModelInfo(Path("gemma"), GEMMA_3_27B, {}))
    layers = model.attention_layers
    return KVCacheSpec.of(layers, config.block_size, select_groups(config, layers, context()))


def most_at_once(config: EngineConfig, info: WorkerInfo) -> int:
    """Requests of the whole context that are held at once, prompts computed, until the first one ends."""
    core = EngineCore(config, ModelInfo(Path("gemma"), GEMMA_3_27B, {}), Instant(info), KEY)
    core.start()
    rng = np.random.default_rng(0)
    for number in range(config.max_num_seqs):
        prompt = rng.integers(3, 200_000, LENGTH - 256).tolist()
        core.add_request(make_request(str(number), prompt, max_tokens=256, ignore_eos=True))
    most, rows = 0, core.scheduler.rows
    while not any(output.finish_reason for output in core.step()):
        most = max(most, int((rows.runnable & (rows.num_confirmed >= LENGTH - 256)).sum()))
    assert not core.stats().figures["preemptions"], "one had to give way"
    return most


def test_gemma_3_27b_holds_four_times_the_requests_and_more() -> None:
    held, notes = {}, {}
    for option in ("auto", "off"):
        config = EngineConfig(
            model="gemma",
            hybrid_kv_cache=option,
            max_model_len=LENGTH,
            kv_cache_memory_bytes=KV_BYTES,
            max_num_seqs=24,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
        )
        spec = spec_of(config)
        num_blocks = size_kv_cache(config, spec, LENGTH, CPU, lambda: 0)
        assert num_blocks * spec.bytes_per_block <= KV_BYTES
        notes[option] = describe(spec, num_blocks, LENGTH)[-1]
        held[option] = most_at_once(config, WorkerInfo(num_blocks, "fake", "bfloat16", kv_windows=spec.windows))
    assert held == {"auto": 20, "off": 4}  # the figures of docs/models.md
    assert "room for 22.8 requests of 32768 tokens; 4.4 without" in notes["auto"]
    assert "room for 4.4 requests" in notes["off"]
