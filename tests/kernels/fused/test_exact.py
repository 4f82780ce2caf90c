"""The exact fused functions: those of the reference within rounding, and a token's bits alone and among others."""

from __future__ import annotations

import pytest
import torch

from app.errors import UnsupportedError
from app.kernels.attention import HeadNorm
from app.kernels.fused import FUSED_OPS, FusedOps, LatentRotation, reference
from app.kernels.fused.exact import OPS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
CPU = torch.device("cpu")


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    assert FUSED_OPS.on(CPU, exact=True) is OPS
    assert FUSED_OPS.on(CPU) is reference.OPS
    x, residual, weight = (randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(21, 90), (21, 90), (90,)]))
    calls = {
        "norm": lambda ops, rows: ops.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        "both": lambda ops, rows: ops.add_rms_norm(x[rows], residual[rows], weight, 1e-5, weight)[0],
        "sum": lambda ops, rows: ops.add_rms_norm(x[rows], residual[rows], None, 1e-5)[1],
        "first": lambda ops, rows: ops.rms_norm(x[rows], weight, 1e-5),
        "wide": lambda ops, rows: ops.rms_norm(x[rows], weight.float(), 1e-5),
        "sigmoid": lambda ops, rows: ops.sigmoid(x[rows] * 5),
        "times_sigmoid": lambda ops, rows: ops.times_sigmoid(x[rows], x[rows] * 5),
        "tanh": lambda ops, rows: ops.tanh(x[rows]),
        "silu": lambda ops, rows: ops.act_and_mul(x[rows] * 5, "silu"),
        "gelu": lambda ops, rows: ops.act_and_mul(x[rows] * 5, "gelu"),
        "gelu_tanh": lambda ops, rows: ops.act_and_mul(x[rows] * 5, "gelu_tanh"),
    }
    for name, call in calls.items():
        found, truth = call(OPS, slice(None)), call(reference.OPS, slice(None))
        torch.testing.assert_close(found, truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        for token in (0, 20):
            assert torch.equal(call(OPS, slice(token, token + 1))[0], found[token]), name


@pytest.mark.parametrize("rotary_dim", [20, 12])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation(dtype: torch.dtype, has_norm: bool, rotary_dim: int) -> None:
    heads, angles = randn(9, 5 + 4, 20, dtype=dtype), randn(9, 1, rotary_dim, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = HeadNorm(*(randn(20, dtype=dtype, seed=i) for i in (1, 2)), 1e-5) if has_norm else None
    slots = torch.tensor([3, 0, -1, 7, 4, 5, 11, 9, 2])

    def call(ops: FusedOps, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(3, 2, 2, 4, 20, dtype=dtype)
        query = ops.rotate_and_write(heads[rows].clone(), cos[rows], sin[rows], norm, cache, slots[rows], None)
        turned = heads[rows, :7].clone()
        ops.rotate_heads(turned, cos[rows], sin[rows], norm, 5)
        assert torch.equal(turned[:, :5], query)
        return query, cache

    found, truth = call(OPS, slice(None)), call(reference.OPS, slice(None))
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for token in (0, 8):
        query, cache = call(OPS, slice(token, token + 1))
        block, offset = divmod(int(slots[token]), 4)
        assert torch.equal(query[0], found[0][token])
        assert torch.equal(cache[block, :, :, offset], found[1][block, :, :, offset])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("size", "rotary_dim"), [(128, 128), (80, 32)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_head_has_the_same_bits_on_any_number_of_ranks(
    has_norm: bool, size: int, rotary_dim: int, device: str
) -> None:
    """Whichever heads lie beside it, and in whichever place."""
    num_heads, num_kv_heads, dtype, ops = 8, 4, torch.bfloat16, FUSED_OPS.on(torch.device(device), exact=True)
    heads = randn(70, num_heads + 2 * num_kv_heads, size, dtype=dtype).to(device)
    angles = randn(70, 1, rotary_dim, dtype=torch.float32).to(device)
    norm = HeadNorm(*(randn(size, dtype=dtype, seed=i).to(device) for i in (1, 2)), 1e-5) if has_norm else None
    cos, sin, slots = angles.cos().to(dtype), angles.sin().to(dtype), torch.arange(70, device=device)

    def call(own: torch.Tensor, num_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(5, 2, num_kv, 16, size, dtype=dtype, device=device)
        return ops.rotate_and_write(own, cos, sin, norm, cache, slots, None), cache

    whole = call(heads, num_kv_heads)
    parts = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
    for ranks in (2, 4):
        for rank in range(ranks):
            own = torch.cat([part.chunk(ranks, 1)[rank] for part in parts], 1)
            query, cache = call(own, num_kv_heads // ranks)
            assert torch.equal(query, whole[0].chunk(ranks, 1)[rank]), (ranks, rank)
            assert torch.equal(cache, whole[1].chunk(ranks, 2)[rank]), (ranks, rank)


def test_latents_are_refused() -> None:
    x = torch.zeros(1, 1, 4)
    rotation = LatentRotation(x, x, False, torch.ones(2), 1e-5)
    with pytest.raises(UnsupportedError, match="deterministic: latent attention"):
        OPS.rotate_and_write_latent(x, x[0], rotation, x, torch.zeros(1).long(), None, x)
