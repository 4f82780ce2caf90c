"""Decodes that norm, rotate, write and attend in one launch, against the plain functions one behind the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from app.kernels.attention import KV_FP8, AttentionOptions, HeadBias, HeadNorm, triton_ops
from app.kernels.attention.reference import naive_paged_attention
from app.kernels.attention.triton_rotated import LONGEST, most_splits, rotated_decode, rotated_scratch, serves_rotated
from app.kernels.fused.reference import rotate_and_write
from tests.kernels.attention.cases import make_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("lens", "heads", "rotary_dim", "window", "has_norm", "has_sinks"),
    [
        ([1, 64, 65, 577], (4, 2, 64), 64, None, True, False),
        ([300, 66], (8, 1, 128), 64, None, False, True),
        ([129, 128, 700], (4, 4, 64), 64, 128, False, True),
        ([5000], (2, 1, 64), 64, None, True, False),
        ([2600, 2113], (8, 8, 64), 64, None, False, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])])
def test_against_the_plain_functions(
    lens: list[int],
    heads: tuple[int, int, int],
    rotary_dim: int,
    window: int | None,
    has_norm: bool,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    batch = make_batch(
        [(1, length) for length in lens], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        dtype=dtype, device=DEVICE,
    )  # fmt: skip
    meta, generator = batch.meta, torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    rows = randn(len(lens), num_heads + 2 * num_kv_heads + 1, head_dim)[:, :-1]
    angles = torch.rand(len(lens), 1, rotary_dim // 2, generator=generator).to(DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    norm = HeadNorm(randn(head_dim), randn(head_dim), 1e-6) if has_norm else None
    bias = HeadBias(torch.randn(num_heads, generator=generator).to(DEVICE)) if has_sinks else None
    cache, truth_cache = batch.kv_cache.clone(), batch.kv_cache.clone()
    query = rotate_and_write(rows, cos, sin, norm, truth_cache, meta.slot_mapping, None)
    options = AttentionOptions(head_dim**-0.5, window, None, None, bias)
    truth = naive_paged_attention(query, truth_cache, meta, scale=options.scale, sliding_window=window, bias=bias)
    scratch = rotated_scratch(meta, num_heads, num_kv_heads, head_dim)
    for _ in range(2):  # a layer, and the next one
        out = rotated_decode(rows, cos, sin, norm, cache, meta, scratch, options)
        bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
        assert float((out.double() - truth.double()).norm() / truth.double().norm()) < bound
        # A rotated number is the difference of two that were rounded.
        few = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(cache, truth_cache, equal_nan=True, rtol=2.0**-7, atol=few)
    assert not scratch[2].any()


def test_which_steps_it_serves() -> None:
    batch = make_batch([(1, 40)], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
    rows, options = torch.zeros(1, 8, 64, dtype=torch.float16), AttentionOptions(0.1)
    meta = replace(batch.meta, is_static=True, is_apart=True)
    assert serves_rotated(rows, batch.kv_cache, meta, options)
    assert serves_rotated(rows, batch.kv_cache, meta, replace(options, bias=HeadBias(torch.zeros(4)), sliding_window=9))
    assert not serves_rotated(rows, batch.kv_cache, batch.meta, options)
    assert not serves_rotated(rows, batch.kv_cache, replace(meta, is_apart=False), options)  # drafts of one request
    assert not serves_rotated(rows, batch.kv_cache, replace(meta, num_decodes=0), options)  # beside a prompt
    assert not serves_rotated(rows, batch.kv_cache, replace(meta, max_seq_len=LONGEST + 1), options)
    assert not serves_rotated(rows.float(), batch.kv_cache.float(), meta, options)
    assert not serves_rotated(rows, batch.kv_cache.to(KV_FP8), meta, options)
    assert not serves_rotated(rows, batch.kv_cache, meta, replace(options, soft_cap=30.0))
    assert not serves_rotated(rows, batch.kv_cache, meta, replace(options, bias=HeadBias(slopes=torch.zeros(4))))
    assert not serves_rotated(rows[..., :48], batch.kv_cache[..., :48], meta, options)


def test_layers_of_a_step_share_what_they_pass_on() -> None:
    batch = make_batch([(1, 100)], num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16, device=DEVICE)
    meta = replace(batch.meta, is_static=True, is_apart=True)
    triton_ops.OPS.prepare(meta, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    rows, one = torch.randn(1, 8, 64, device=DEVICE).half(), torch.ones(1, 1, 64, device=DEVICE).half()
    first, second = (
        triton_ops.OPS.at_once(rows, one, one * 0, None, batch.kv_cache, meta, AttentionOptions(0.125))
        for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
    many = replace(batch.meta, is_static=False)
    triton_ops.OPS.prepare(many, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
    assert triton_ops.OPS.at_once(rows, one, one, None, batch.kv_cache, many, AttentionOptions(0.125)) is None


def test_all_splits_of_a_context_run_at_once() -> None:
    found = [most_splits(heads) for heads in (1, 2, 4, 5, 8, 16, 32, 300)]
    assert found == [64, 64, 64, 32, 32, 16, 8, 1]
