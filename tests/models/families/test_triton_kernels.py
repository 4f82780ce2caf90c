"""A model whose every Triton kernel runs (in the interpreter, or on a GPU) against transformers; launches counted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from app.checkpoints.model_info import ModelInfo
from app.distributed.parallel_groups import ParallelGroups
from app.kernels.attention import AttentionMetadata, triton_ops
from app.kernels.fused import FUSED_OPS
from app.kernels.fused import triton_ops as fused_kernels
from app.kernels.gemm import LINEAR_OPS, DeferredNorm, small_tiles, triton_small
from app.layers.context import BuildContext, ForwardContext
from app.loading.loader import load_model
from app.models.decoder import CausalLM
from app.worker.attention.kv_cache import KVCacheSpec
from tests.models.families.expert_variants import LATENT, LATENT_YARN
from tests.tiny_models import hf_model, tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE = 16


def triton_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    """Callers have put the Triton functions into the table."""
    directory = tiny_model(family, **changes)
    ctx = BuildContext(dtype, DEVICE, 512, triton_ops.OPS, ParallelGroups())
    return load_model(ModelInfo.from_directory(str(directory)), ctx, "safetensors", 0)


def step(model: CausalLM, caches: list[torch.Tensor], token_ids: list[int], start: int) -> torch.Tensor:
    """Hidden states of one request's tokens from position `start` on; its blocks are 1, 2, ..."""
    count, length = len(token_ids), start + len(token_ids)
    positions = torch.arange(start, length, device=DEVICE)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=DEVICE),
        block_table=torch.arange(1, len(caches[0]), dtype=torch.int32, device=DEVICE)[None],
        slot_mapping=positions + BLOCK_SIZE,
        max_query_len=count,
        max_seq_len=length,
        num_decodes=1 if count == 1 else 0,
    )
    model.attention_layers[0].plan(meta, BLOCK_SIZE)
    metas = [meta] * len(caches)
    hidden: torch.Tensor = model(torch.tensor(token_ids, device=DEVICE), ForwardContext(positions, metas, caches))
    return hidden


def empty_caches(model: CausalLM) -> list[torch.Tensor]:
    layers = model.attention_layers
    specs = KVCacheSpec.of(layers, BLOCK_SIZE)
    return [cache.fill_(float("nan")) for cache in specs.allocate(6, DEVICE)]


@pytest.fixture(autouse=True)
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FUSED_OPS, "on", lambda *_, **__: fused_kernels.OPS)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16}),
        ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80}),
        ("mistral", {"sliding_window": 24}),
        ("youtu", {**LATENT, "rope_parameters": LATENT_YARN}),  # the first step is expanded, the others absorbed
    ],
)
@torch.inference_mode()
def test_logits_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    model, judge = triton_model(family, **changes), hf_model(tiny_model(family, **changes))
    token_ids = torch.randint(3, 331, (41,), generator=torch.Generator().manual_seed(0)).tolist()
    truth = judge(torch.tensor([token_ids], device=judge.device)).logits[0].float().cpu()
    caches = empty_caches(model)
    hidden = [step(model, caches, token_ids[:30], 0), step(model, caches, token_ids[30:40], 30)]
    hidden.append(step(model, caches, token_ids[40:], 40))
    torch.testing.assert_close(model.raw_logits(torch.cat(hidden)).float().cpu(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_products_of_few_rows_equal_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Residual and norm in the products, in fp32 here; a prompt of more rows goes the other way."""
    monkeypatch.setattr(LINEAR_OPS, "on", lambda *_, **__: triton_small.OPS)
    monkeypatch.setattr(small_tiles, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(triton_small, "may_defer_norm", lambda *_: True)
    monkeypatch.setattr(small_tiles, "MOST_ROWS", 4)
    seen: list[bool] = []
    small_linear = triton_small.small_linear

    def spy(x: Any, *args: Any, **keywords: Any) -> torch.Tensor:
        seen.append(isinstance(x, DeferredNorm))
        return small_linear(x, *args, **keywords)

    monkeypatch.setattr(triton_small, "small_linear", spy)
    changes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, judge = triton_model(family, **changes), hf_model(tiny_model(family, **changes))
    token_ids = torch.randint(3, 331, (14,), generator=torch.Generator().manual_seed(0)).tolist()
    truth = judge(torch.tensor([token_ids], device=judge.device)).logits[0].float().cpu()
    caches = empty_caches(model)
    hidden = [step(model, caches, token_ids[:10], 0)]
    assert not seen
    hidden.append(step(model, caches, token_ids[10:13], 10))
    hidden.append(step(model, caches, token_ids[13:], 13))
    assert sum(seen) == 2 * 3  # all but the first of two layers' four
    torch.testing.assert_close(model.raw_logits(torch.cat(hidden)).float().cpu(), truth, rtol=1e-3, atol=1e-3)


def decode_launches(model: CausalLM) -> dict[str, int]:
    """Kernels of a decode step after a prompt, by name, on a GPU."""
    caches = empty_caches(model)
    step(model, caches, list(range(3, 30)), 0)
    step(model, caches, [5], 27)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, caches, [6], 28)
        torch.cuda.synchronize()
    return {e.key: e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA}


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.inference_mode()
def test_launches_of_a_decode_layer(family: str) -> None:
    """In fp32, beside the four products: two norms, rotation with KV write, attention, SiLU; no more. One norm comes
    before all layers."""

    @functools.cache
    def launches(num_layers: int) -> int:
        counts = decode_launches(triton_model(family, num_hidden_layers=num_layers))
        assert sum(count for name, count in counts.items() if "rotate_and_write" in name) == num_layers, counts
        assert sum(count for name, count in counts.items() if "act_and_mul" in name) == num_layers, counts
        assert sum(count for name, count in counts.items() if "add_rms_norm" in name) == 2 * num_layers + 1, counts
        assert sum(count for name, count in counts.items() if "decode_kernel" in name) == num_layers, counts
        products = ("gemm", "gemv", "cutlass", "cublas", "splitk", "nvjet", "dot_kernel")  # one may be several launches
        return sum(count for name, count in counts.items() if not any(part in name.lower() for part in products))

    assert launches(4) - launches(2) <= 2 * 5


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@torch.inference_mode()
def test_launches_of_a_decode_layer_in_bf16(family: str) -> None:
    """Four products, rotation with KV write, attention: norms and SiLU ride along. The first norm, which follows no
    product, is a launch of its own, the last, which none follows, torch's; the product after the first is cuBLAS's."""
    sizes = {"hidden_size": 256, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}

    def counts(num_layers: int) -> dict[str, int]:
        return decode_launches(triton_model(family, torch.bfloat16, num_hidden_layers=num_layers, **sizes))

    found = {num_layers: counts(num_layers) for num_layers in (2, 4)}
    for num_layers, launches in found.items():
        expected = {
            "small_linear_kernel": 2 * num_layers - 1,
            "small_linear_add_kernel": 2 * num_layers,
            "rotate_and_write_kernel": num_layers,
            "decode_kernel": num_layers,
            "add_rms_norm_kernel": 1,
            "act_and_mul_kernel": 0,
        }
        assert {name: launches.get(name, 0) for name in expected} == expected, launches
    assert sum(found[4].values()) - sum(found[2].values()) == 2 * 6, found
