"""The fused functions against float64 PyTorch: the CPU path, and Triton (in its interpreter, or on a real GPU)."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from app.kernels.fused import (
    FusedOps,
    GatedActivation,
    HeadNorm,
    LatentRotation,
    reference,
    triton_heads,
    triton_latent,
    triton_ops,
)
from tests.kernels.gemm.test_fp8 import nearest_e4m3

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
OPS = [pytest.param(reference.OPS, id="torch"), pytest.param(triton_ops.OPS, id="triton")]
# The interpreter computes wrongly in bf16; the GPU tests cover it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(got: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), truth, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 16), (3, 1030)])
def test_times_sigmoid(ops: FusedOps, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x, gate = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size + 8, dtype=dtype, seed=1)[:, :size]
    close(ops.times_sigmoid(x, gate), x.double() * gate.double().sigmoid(), dtype)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 16), (5, 112), (3, 1030)])
def test_add_rms_norm(ops: FusedOps, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x = randn(num_tokens, size + 8, dtype=dtype)[:, :size]  # rows with a gap between them
    residual, weight = randn(num_tokens, size, dtype=dtype, seed=1) * 5, randn(size, dtype=dtype, seed=2)
    kept = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert torch.equal(total, x + residual)
    truth = total.double()
    truth = truth * (truth.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(normed, truth, dtype)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (1, 16), (5, 112), (3, 1030)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_add_layer_norm(ops: FusedOps, dtype: torch.dtype, num_tokens: int, size: int, has_bias: bool) -> None:
    x = randn(num_tokens, size + 8, dtype=dtype)[:, :size]  # rows with a gap between them
    residual, weight = randn(num_tokens, size, dtype=dtype, seed=1) * 5 + 3, randn(size, dtype=dtype, seed=2)
    bias = randn(size, dtype=dtype, seed=3) if has_bias else None
    kept = x.clone(), residual.clone()
    normed, total = ops.add_layer_norm(x, residual, weight, bias, 1e-5, keeps_sum=True)
    alone, nothing = ops.add_layer_norm(x, residual, weight, bias, 1e-5, keeps_sum=False)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    assert total is not None
    assert torch.equal(total, x + residual)
    assert nothing is None
    assert torch.equal(alone, normed)
    wide = None if bias is None else bias.double()
    truth = torch.nn.functional.layer_norm(total.double(), (size,), weight.double(), wide, 1e-5)
    close(normed, truth, dtype)
    close(ops.layer_norm(total, weight, bias, 1e-5), truth, dtype)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])  # None: the rows' own
@pytest.mark.parametrize("shape", [(0, 64), (1, 112), (3, 2, 1030)])
def test_rms_norm(ops: FusedOps, dtype: torch.dtype, weight_dtype: torch.dtype | None, shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=weight_dtype or dtype, seed=1)
    truth = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(ops.rms_norm(x, weight, 1e-5), truth, dtype)
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)  # columns lie side by side
    close(ops.rms_norm(turned, weight, 1e-5), truth, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 768), (1, 3, 64), (16, 768), (17, 768)])
def test_a_norm_rounds_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    truth = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    normed = reference.rms_norm(x, weight, 1e-5)
    assert normed.shape == x.shape
    half_a_step = torch.finfo(dtype).eps / 2 * 1.001  # fp32's own rounding moves few numbers past the middle
    torch.testing.assert_close(normed.double(), truth, rtol=half_a_step, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_norm_of_zeros_is_zero(num_tokens: int) -> None:
    zeros = torch.zeros(num_tokens, 64, dtype=torch.bfloat16)
    assert not reference.rms_norm(zeros, torch.ones(64, dtype=torch.bfloat16), 1e-6).any()


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])  # None: the rows' own
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 64), (5, 112), (3, 1030)])
def test_what_is_added_is_normed_first(
    ops: FusedOps, dtype: torch.dtype, weight_dtype: torch.dtype | None, num_tokens: int, size: int
) -> None:
    x, residual = randn(num_tokens, size, dtype=dtype) * 3, randn(num_tokens, size, dtype=dtype, seed=1)
    first, weight = (randn(size, dtype=weight_dtype or dtype, seed=seed) for seed in (2, 3))
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * first.double()
    expected = expected.to(dtype).double() + residual.double()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, first)
    close(total, expected, dtype)
    close(normed, total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight, dtype)
    for one in ops.add_rms_norm(x, residual, None, 1e-5, first):
        assert torch.equal(one, total)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(GatedActivation))
@pytest.mark.parametrize(("num_tokens", "size"), [(0, 8), (1, 3), (4, 1500)])
def test_act_and_mul(
    ops: FusedOps, dtype: torch.dtype, activation: GatedActivation, num_tokens: int, size: int
) -> None:
    gate_up = randn(num_tokens, 2 * size, dtype=dtype) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    truths = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate / 2 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }
    close(ops.act_and_mul(gate_up, activation), truths[activation] * up, dtype)


def judge(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: HeadNorm | None, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, rotated keys and values in float64, rotation written with complex numbers."""
    heads, cos, sin = heads.double(), cos.double(), sin.double()
    query, key, value = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if norm is not None and weight is not None:
            x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weight.double()
        half = cos.shape[-1] // 2
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
        pairs = pairs * torch.complex(cos[..., :half], sin[..., half:])
        return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)

    query_weight, key_weight = (norm.query_weight, norm.key_weight) if norm is not None else (None, None)
    return turned(query, query_weight), turned(key, key_weight), value


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "use_norm", "num_tokens"),
    [
        (4, 2, 64, 64, 16, True, 5),
        (7, 1, 80, 80, 32, False, 40),
        (3, 3, 96, 32, 16, False, 3),
        (14, 2, 64, 64, 16, False, 1),
        (2, 1, 256, 64, 16, True, 2),
        (5, 5, 128, 128, 64, True, 0),
    ],
)
def test_rotate_and_write(
    ops: FusedOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int,
    block_size: int, use_norm: bool, num_tokens: int,
) -> None:  # fmt: skip
    heads = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = torch.rand(num_tokens, 1, rotary_dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    weights = randn(2, head_dim, dtype=dtype, seed=3)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if use_norm else None
    num_blocks = num_tokens // block_size + 3
    kv_cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype, device=DEVICE)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens].to(DEVICE)
    slots[num_tokens // 2 :: 3] = -1
    before = heads.clone()
    out = ops.rotate_and_write(heads, cos, sin, norm, kv_cache, slots)
    assert torch.equal(heads, before)
    query, key, value = judge(heads, cos, sin, norm, num_kv_heads)
    assert out.shape == query.shape
    close(out, query, dtype)
    expected = torch.full_like(kv_cache, 7.0, dtype=torch.float64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, :, slot % block_size] = key[token]
            expected[slot // block_size, 1, :, slot % block_size] = value[token]
    close(kv_cache, expected, dtype)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("use_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "num_tokens"),
    [(4, 2, 64, 64, 5), (7, 1, 72, 72, 3), (3, 3, 96, 32, 2), (40, 8, 128, 128, 1), (2, 2, 64, 64, 0)],
)
def test_heads_are_rotated_in_their_product(
    ops: FusedOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int,
    num_tokens: int, use_norm: bool,
) -> None:  # fmt: skip
    heads = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    angles = torch.rand(num_tokens, 1, rotary_dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    weights = randn(2, head_dim, dtype=dtype, seed=3)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if use_norm else None
    expected = torch.cat(judge(heads, cos, sin, norm, num_kv_heads), dim=1)
    ops.rotate_heads(heads[:, : num_heads + num_kv_heads], cos, sin, norm, num_heads)
    close(heads, expected, dtype)  # values are as they were


@pytest.mark.usefixtures("rounding_e4m3")
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size", "use_norm", "num_tokens"),
    [
        (4, 2, 64, 64, 16, True, 5),
        (7, 1, 80, 80, 32, False, 40),
        (3, 3, 96, 32, 16, False, 3),
        (2, 1, 256, 64, 16, True, 2),
        (5, 5, 128, 128, 64, True, 0),
    ],
)
def test_rotate_and_write_to_a_quantized_cache(
    ops: FusedOps, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int,
    block_size: int, use_norm: bool, num_tokens: int,
) -> None:  # fmt: skip
    heads = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    heads[:1] *= 300  # beyond what the cache holds
    angles = torch.rand(num_tokens, 1, rotary_dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    weights = randn(2, head_dim, dtype=dtype, seed=3)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if use_norm else None
    scales = (0.3 + 0.17 * torch.arange(2.0 * num_kv_heads)).view(2, num_kv_heads).to(DEVICE)
    slots = torch.randperm(3 * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens].to(DEVICE)
    slots[num_tokens // 2 :: 3] = -1
    cache = torch.full((3, 2, num_kv_heads, block_size, head_dim), 7.0, device=DEVICE).to(torch.float8_e4m3fn)
    out = ops.rotate_and_write(heads, cos, sin, norm, cache, slots, scales)
    query, key, value = judge(heads, cos, sin, norm, num_kv_heads)
    close(out / 300, query / 300, dtype)  # in units of the largest
    rounding = torch.full(cache.shape, 7.0, dtype=torch.float64, device=DEVICE)
    for token, slot in enumerate(slots.tolist()):
        for half, x in enumerate((key, value)):
            if slot >= 0:
                scaled = (x[token] / scales[half][:, None].double()).cpu().numpy()
                rounding[slot // block_size, half, :, slot % block_size] = torch.from_numpy(nearest_e4m3(scaled))
    # Where arithmetic in fewer bits falls on the other side of a tie, a neighbour; a subnormal's is 2**-9 away. Of two
    # products that cancel bf16 leaves what it rounded off.
    found = cache.double()
    torch.testing.assert_close(found, rounding, rtol=0.13, atol=2.0 ** (-6 if dtype == torch.bfloat16 else -9))
    same = (found == rounding).double().mean()
    assert same > {torch.float32: 0.9995, torch.float16: 0.98, torch.bfloat16: 0.9}[dtype]


def turned_pairs(x: torch.Tensor, angles: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """x [T, H, Dr] rotated by angles [T, 1, Dr / 2] in float64, with complex numbers; the result in halves."""
    x, half = x.double(), x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "size", "dim", "block_size", "interleaved", "num_tokens"),
    [(16, 512, 64, 16, True, 3), (5, 48, 24, 32, False, 7), (1, 30, 6, 16, True, 33), (40, 256, 32, 64, True, 0)],
)
def test_rotate_and_write_latent(
    ops: FusedOps, dtype: torch.dtype, in_place: bool, num_heads: int, size: int, dim: int, block_size: int,
    interleaved: bool, num_tokens: int,
) -> None:  # fmt: skip
    rows = randn(num_tokens, num_heads, dim + 10, dtype=dtype)  # what does not rotate stands before it
    latent = randn(num_tokens, size + dim + 3, dtype=dtype, seed=1)[:, : size + dim] * 3
    angles = torch.rand(num_tokens, 1, dim // 2, generator=torch.Generator().manual_seed(1)).to(DEVICE).double() * 6
    cos, sin = (torch.cat(x, dim=-1).to(dtype) for x in (2 * (angles.cos(),), (-angles.sin(), angles.sin())))
    weight = randn(size, dtype=dtype, seed=3)
    cache = torch.full((3, block_size, size + dim), 7.0, dtype=dtype, device=DEVICE)
    slots = torch.randperm(3 * block_size, generator=torch.Generator().manual_seed(2))[:num_tokens].to(DEVICE)
    slots[num_tokens // 2 :: 3] = -1
    query, before = rows[..., 10:], rows.clone()
    out = query if in_place else torch.full((num_tokens, num_heads, size + dim), 7.0, dtype=dtype, device=DEVICE)
    place = out if in_place else out[..., size:]
    expected = turned_pairs(before[..., 10:], angles, interleaved=interleaved)
    normed = latent[:, :size].double() * (latent[:, :size].double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    key = turned_pairs(latent[:, None, size:], angles, interleaved=interleaved)[:, 0]
    rotation = LatentRotation(cos, sin, interleaved, weight, 1e-6)
    ops.rotate_and_write_latent(query, latent, rotation, cache, slots, None, place)
    close(place, expected, dtype)
    assert torch.equal(rows[..., :10], before[..., :10])
    if not in_place:
        assert torch.equal(rows, before)
        assert bool((out[..., :size] == 7).all())
    truth = torch.full_like(cache, 7.0, dtype=torch.float64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            truth[slot // block_size, slot % block_size] = torch.cat((normed[token] * weight.double(), key[token]))
    close(cache, truth, dtype)


@pytest.mark.usefixtures("rounding_e4m3")
@pytest.mark.parametrize("ops", OPS)
def test_rotate_and_write_latent_to_a_quantized_cache(ops: FusedOps) -> None:
    query, latent = randn(9, 2, 16, dtype=torch.float32), randn(9, 56, dtype=torch.float32, seed=1)
    latent[0] *= 300  # its rotated key is beyond what the cache holds
    angles = torch.rand(9, 1, 8, generator=torch.Generator().manual_seed(1)).to(DEVICE).double() * 6
    cos, sin = (torch.cat(x, dim=-1).float() for x in (2 * (angles.cos(),), (-angles.sin(), angles.sin())))
    rotation = LatentRotation(cos, sin, True, randn(40, dtype=torch.float32, seed=3), 1e-6)
    exact = torch.zeros(1, 16, 56, device=DEVICE)
    cache, slots = exact.to(torch.float8_e4m3fn), torch.arange(9, device=DEVICE)
    ops.rotate_and_write_latent(query, latent, rotation, exact, slots, None, torch.empty_like(query))
    scale = torch.tensor([0.37], device=DEVICE)
    ops.rotate_and_write_latent(query, latent, rotation, cache, slots, scale, torch.empty_like(query))
    rounded = torch.from_numpy(nearest_e4m3((exact.double() / 0.37).cpu().numpy())).to(DEVICE)
    assert float(rounded.abs().max()) == 448
    assert (cache.double() == rounded).double().mean() > 0.995
    torch.testing.assert_close(cache.double(), rounded, rtol=0.13, atol=2.0**-9)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 8192])
def test_model_sized_shapes_on_the_gpu(num_tokens: int) -> None:
    dtype = torch.bfloat16
    x, residual = randn(num_tokens, 4096, dtype=dtype), randn(num_tokens, 4096, dtype=dtype, seed=1)
    weight = randn(4096, dtype=dtype, seed=2)
    for got, truth in zip(
        triton_ops.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(got, truth, rtol=2e-2, atol=2e-2)
    gate_up = randn(num_tokens, 2 * 14336, dtype=dtype)
    torch.testing.assert_close(
        triton_ops.act_and_mul(gate_up, "silu"),
        reference.act_and_mul(gate_up.float(), "silu").to(dtype),
        rtol=2e-2,
        atol=2e-2,
    )
    heads = randn(num_tokens, 48, 128, dtype=dtype)
    cos, sin = randn(num_tokens, 1, 128, dtype=dtype, seed=4), randn(num_tokens, 1, 128, dtype=dtype, seed=5)
    slots = torch.randperm(num_tokens + 64, generator=torch.Generator().manual_seed(2))[:num_tokens].to(DEVICE)
    caches = torch.zeros(2, num_tokens // 16 + 4, 2, 8, 16, 128, dtype=dtype, device=DEVICE).unbind()
    got = triton_ops.rotate_and_write(heads, cos, sin, None, caches[0], slots)
    truth = reference.rotate_and_write(heads, cos, sin, None, caches[1], slots)
    torch.testing.assert_close(got, truth, rtol=2e-2, atol=5e-2)
    torch.testing.assert_close(caches[0], caches[1], rtol=2e-2, atol=5e-2)


def test_a_rotation_rounds_every_product_so_that_the_number_of_heads_changes_no_bit(monkeypatch: Any) -> None:
    """How each of two products is rounded is the compiler's choice otherwise, by the kernel's constants."""
    asked: list[dict[str, Any]] = []

    def noted(grid: Any) -> Any:
        return lambda *arguments, **options: asked.append(options)

    for module, name in (
        (triton_ops, "rotate_and_write_kernel"),
        (triton_heads, "rotate_heads_kernel"),
        (triton_latent, "rotate_and_write_latent_kernel"),
    ):
        monkeypatch.setattr(module, name, type("Noted", (), {"__getitem__": lambda self, grid: noted(grid)})())
    heads, angles, cache = torch.zeros(2, 6, 16), torch.zeros(2, 1, 16), torch.zeros(2, 2, 1, 8, 16)
    slots, weight = torch.zeros(2, dtype=torch.int64), torch.ones(16)
    triton_ops.rotate_and_write(heads, angles, angles, HeadNorm(weight, weight, 1e-6), cache, slots)
    triton_heads.rotate_heads(heads, angles, angles, HeadNorm(weight, weight, 1e-6), 4)
    rotation = LatentRotation(angles, angles, False, weight, 1e-6)
    triton_latent.rotate_and_write_latent(
        heads, torch.zeros(2, 32), rotation, torch.zeros(2, 8, 32), slots, None, heads
    )
    assert [options["enable_fp_fusion"] for options in asked] == [False] * 3
