# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The fused functions in Triton (`OPS`): one launch each, grids from shapes alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.attention import HeadNorm
from app.kernels.attention.triton_quantize import quantize
from app.kernels.fused import FusedOps, GatedActivation, PlainActivation
from app.kernels.fused.triton_heads import rotate_heads
from app.kernels.fused.triton_latent import rotate_and_write_latent
from app.kernels.fused.triton_ranks import sum_add_norm
from app.kernels.launch import ROUNDS_PRODUCTS, cdiv, early_launch, next_power_of_2
from app.kernels.quick_launch import quick_launch

# Elements of one program of rotate_and_write; the same for any number of tokens, so that a norm has the same bits (I6).
_HEADS_TILE_ELEMENTS = 1024
_ACT_TILE = 1024
_FEW_ROWS = 8  # of a layer norm, whose programs leave most of the device to the next kernel


@quick_launch
@triton.jit
def add_rms_norm_kernel(
    p_x, p_residual, p_weight, p_input_weight, p_out, p_total, stride_x, stride_residual, eps,
    C: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one token's row; without a residual it is normed as it is."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    b_x = tl.load(p_x + i_t * stride_x + o_c, mask=m, other=0.0).to(tl.float32)
    if p_input_weight is not None:
        b_rms = tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps)
        b_weight = tl.load(p_input_weight + o_c, mask=m, other=0.0).to(tl.float32)
        b_x = (b_x * b_rms * b_weight).to(p_x.dtype.element_ty).to(tl.float32)  # rounded, as a norm of its own is
    b_total = b_x
    if p_residual is not None:
        b_residual = tl.load(p_residual + i_t * stride_residual + o_c, mask=m, other=0.0).to(tl.float32)
        b_rounded = (b_x + b_residual).to(p_total.dtype.element_ty)
        tl.store(p_total + i_t * C + o_c, b_rounded, mask=m)
        b_total = b_rounded.to(tl.float32)  # the norm is that of what is stored
    if p_weight is not None:
        b_rms = tl.rsqrt(tl.sum(b_total * b_total, 0) / C + eps)
        b_weight = tl.load(p_weight + o_c, mask=m, other=0.0).to(tl.float32)
        tl.store(p_out + i_t * C + o_c, (b_total * b_rms * b_weight).to(p_out.dtype.element_ty), mask=m)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    input_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `Composed.add_rms_norm`."""
    num_tokens, size = residual.shape
    assert x.stride(1) == residual.stride(1) == 1, "rows must be contiguous"
    total = torch.empty(num_tokens, size, dtype=residual.dtype, device=x.device)
    out = total if weight is None else torch.empty_like(total)
    if num_tokens > 0:
        add_rms_norm_kernel[(num_tokens,)](
            x, residual, weight, input_weight, out, total, x.stride(0), residual.stride(0), eps,
            C=size, BC=next_power_of_2(size),
            num_warps=min(max(next_power_of_2(size) // 512, 1), 16), **early_launch(x.device),
        )  # fmt: skip
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `reference.rms_norm`: one program a row, so that a row's bits are its own."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()  # channels behind a convolution
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if len(rows) > 0:
        padded = next_power_of_2(rows.shape[1])
        add_rms_norm_kernel[(len(rows),)](
            rows, None, weight, None, out, out, rows.stride(0), 0, eps, C=rows.shape[1], BC=padded,
            num_warps=min(max(padded // 512, 1), 16), **early_launch(x.device),
        )  # fmt: skip
    return out.view(x.shape)


@quick_launch
@triton.jit
def add_layer_norm_kernel(
    p_x, p_residual, p_weight, p_bias, p_out, p_total, stride_x, stride_residual, eps,
    C: tl.constexpr, BC: tl.constexpr, LEAVES_ROOM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T,): one token's row; without a residual it is normed as it is. Weight and bias, which no kernel on the
    stream writes, are on their way before it waits; few rows leave the next kernel room to begin likewise."""
    i_t = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, BC)
    m = o_c < C
    b_weight = tl.load(p_weight + o_c, mask=m, other=0.0).to(tl.float32)
    b_bias = tl.zeros([BC], dtype=tl.float32)
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_c, mask=m, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if LEAVES_ROOM:
            tl.extra.cuda.gdc_launch_dependents()
    b_total = tl.load(p_x + i_t * stride_x + o_c, mask=m, other=0.0).to(tl.float32)
    if p_residual is not None:
        b_residual = tl.load(p_residual + i_t * stride_residual + o_c, mask=m, other=0.0).to(tl.float32)
        b_rounded = (b_total + b_residual).to(p_out.dtype.element_ty)
        if p_total is not None:
            tl.store(p_total + i_t * C + o_c, b_rounded, mask=m)
        b_total = b_rounded.to(tl.float32)  # the norm is that of what is stored
    b_apart = tl.where(m, b_total - tl.sum(b_total, 0) / C, 0.0)
    b_out = b_apart * tl.rsqrt(tl.sum(b_apart * b_apart, 0) / C + eps) * b_weight + b_bias
    tl.store(p_out + i_t * C + o_c, b_out.to(p_out.dtype.element_ty), mask=m)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    keeps_sum: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See AddLayerNorm."""
    total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device) if keeps_sum else None
    return _layer_norm(x, residual, weight, bias, eps, total), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Norms rows [T, C]: the same kernel, without a sum."""
    return _layer_norm(x, None, weight, bias, eps, None)


def _layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    total: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens, size = x.shape
    rows = x if residual is None else residual
    assert x.stride(1) == rows.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_tokens, size, dtype=rows.dtype, device=x.device)
    if num_tokens > 0:
        padded = next_power_of_2(size)
        add_layer_norm_kernel[(num_tokens,)](
            x, residual, weight, bias, out, total, x.stride(0), rows.stride(0), eps, C=size, BC=padded,
            LEAVES_ROOM=num_tokens <= _FEW_ROWS, num_warps=min(max(padded // 512, 1), 16), **early_launch(x.device),
        )  # fmt: skip
    return out


@quick_launch
@triton.jit
def rotate_and_write_kernel(
    p_heads, p_cos, p_sin, p_query_weight, p_key_weight, p_cache, p_scales, p_slots, p_out, eps,
    stride_heads_token, stride_heads_head, stride_angle, stride_block, stride_value, stride_head, stride_slot,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DR: tl.constexpr, S: tl.constexpr,
    BH: tl.constexpr, BD: tl.constexpr, USE_NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (T, tiles of BH heads): the heads of one token, queries first, then keys, then values."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m = (o_h < HQ + 2 * HKV) & (o_d < D)
    is_value = o_h >= HQ + HKV
    p_row = p_heads + i_t * stride_heads_token + o_h * stride_heads_head
    b_x = tl.load(p_row + o_d, mask=m, other=0.0).to(tl.float32)
    # The other half of a rotated head, read again (from the cache of the core) rather than moved between threads.
    o_other = tl.where(o_d < DR // 2, o_d + DR // 2, o_d - DR // 2)
    m_rotated = m & (o_d < DR) & (is_value == 0)
    b_other = tl.load(p_row + o_other, mask=m_rotated, other=0.0).to(tl.float32)
    b_y = b_x
    if USE_NORM:
        b_rms = tl.rsqrt(tl.sum(b_x * b_x, 1)[:, None] / D + eps)
        is_query = o_h < HQ
        m_d, m_other = o_d < D, o_d < DR
        b_query = tl.load(p_query_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_key = tl.load(p_key_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_y = b_x * b_rms * tl.where(is_query, b_query, b_key)
        b_query = tl.load(p_query_weight + o_other, mask=m_other, other=0.0).to(tl.float32)
        b_key = tl.load(p_key_weight + o_other, mask=m_other, other=0.0).to(tl.float32)
        b_other = b_other * b_rms * tl.where(is_query, b_query, b_key)
    m_angle = o_d < DR
    b_cos = tl.load(p_cos + i_t * stride_angle + o_d, mask=m_angle, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_t * stride_angle + o_d, mask=m_angle, other=0.0).to(tl.float32)
    b_out = tl.where(is_value, b_x, b_y * b_cos + b_other * b_sin)
    p_query = p_out + (i_t * HQ + o_h) * D + o_d
    tl.store(p_query, b_out.to(p_out.dtype.element_ty), mask=m & (o_h < HQ))
    b_slot = tl.load(p_slots + i_t)
    if b_slot >= 0:
        i_kv = (o_h - HQ) // HKV  # 0: a key, 1: a value
        o_cache = i_kv * stride_value + ((o_h - HQ) % HKV) * stride_head + o_d
        p_slot = p_cache + b_slot // S * stride_block + b_slot % S * stride_slot + o_cache
        m_kv = m & (o_h >= HQ)
        if p_scales is not None:
            b_scale = tl.load(p_scales + o_h - HQ, mask=(o_h >= HQ) & (o_h < HQ + 2 * HKV), other=1.0)
            tl.store(p_slot, quantize(b_out, b_scale, p_cache.dtype.element_ty), mask=m_kv)
        else:
            tl.store(p_slot, b_out.to(p_cache.dtype.element_ty), mask=m_kv)


def rotate_and_write(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `reference.rotate_and_write`."""
    num_tokens, total_heads, head_dim = heads.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    num_heads = total_heads - 2 * num_kv_heads
    assert heads.stride(2) == kv_cache.stride(4) == 1, "head vectors must be contiguous"
    assert cos.stride() == sin.stride(), "cos and sin must lie alike"
    assert cos.stride(2) == 1, "angles must be contiguous"
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=heads.dtype, device=heads.device)
    if num_tokens == 0:
        return out
    padded = next_power_of_2(head_dim)
    tile = min(_HEADS_TILE_ELEMENTS // padded, next_power_of_2(total_heads))
    query_weight, key_weight = (norm.query_weight, norm.key_weight) if norm is not None else (heads, heads)
    rotate_and_write_kernel[(num_tokens, cdiv(total_heads, tile))](
        heads, cos, sin, query_weight, key_weight, kv_cache, kv_scales, slots, out,
        norm.eps if norm is not None else 0.0,
        heads.stride(0), heads.stride(1), cos.stride(0), *kv_cache.stride()[:4],
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, DR=cos.shape[2], S=block_size, BH=tile, BD=padded,
        USE_NORM=norm is not None, num_warps=max(1, min(4, tile * padded // 256)), **ROUNDS_PRODUCTS,
        **early_launch(heads.device),
    )  # fmt: skip
    return out


@triton.jit
def activate(b_x, ACT: tl.constexpr):
    """The activation of fp32 numbers."""
    if ACT == "silu":
        b_y = b_x * tl.sigmoid(b_x)
    elif ACT == "gelu":
        b_y = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    elif ACT == "relu2":
        b_y = tl.maximum(b_x, 0.0) * tl.maximum(b_x, 0.0)
    else:  # 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        b_y = b_x * tl.sigmoid(1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x))
    return b_y


@quick_launch
@triton.jit
def act_and_mul_kernel(p_x, p_out, stride_x, size, BN: tl.constexpr, ACT: tl.constexpr):
    """Grid (T, tiles of BN)."""
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    m = o < size
    b_gate = tl.load(p_x + i_t * stride_x + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + i_t * stride_x + size + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_out + i_t * size + o, (activate(b_gate, ACT) * b_up).to(p_out.dtype.element_ty), mask=m)


def act_and_mul(gate_up: torch.Tensor, activation: GatedActivation) -> torch.Tensor:
    """The same as `reference.act_and_mul`."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens > 0:
        grid = (num_tokens, cdiv(size, _ACT_TILE))
        act_and_mul_kernel[grid](gate_up, out, gate_up.stride(0), size, BN=_ACT_TILE, ACT=activation, num_warps=4)
    return out


@quick_launch
@triton.jit
def times_sigmoid_kernel(p_x, p_gate, p_out, stride_x, stride_gate, size, BN: tl.constexpr):
    """Grid (T, tiles of BN)."""
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    m = o < size
    b_x = tl.load(p_x + i_t * stride_x + o, mask=m, other=0.0).to(tl.float32)
    b_gate = tl.sigmoid(tl.load(p_gate + i_t * stride_gate + o, mask=m, other=0.0).to(tl.float32))
    b_gate = b_gate.to(p_out.dtype.element_ty).to(tl.float32)
    tl.store(p_out + i_t * size + o, (b_x * b_gate).to(p_out.dtype.element_ty), mask=m)


def times_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The same as `app.kernels.fused.times_sigmoid`."""
    num_tokens, size = x.shape
    assert x.stride(1) == gate.stride(1) == 1, "rows must be contiguous"
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if num_tokens > 0:
        times_sigmoid_kernel[(num_tokens, cdiv(size, _ACT_TILE))](
            x, gate, out, x.stride(0), gate.stride(0), size, BN=_ACT_TILE, num_warps=4
        )
    return out


@quick_launch
@triton.jit
def act_kernel(p_x, size, BN: tl.constexpr, ACT: tl.constexpr):
    """Grid (T, tiles of BN), in place."""
    p_row = p_x + tl.program_id(0).to(tl.int64) * size
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    b_x = tl.load(p_row + o, mask=o < size, other=0.0).to(tl.float32)
    tl.store(p_row + o, activate(b_x, ACT).to(p_x.dtype.element_ty), mask=o < size)


def act_(x: torch.Tensor, activation: PlainActivation) -> torch.Tensor:
    """The activation of x [T, N], which is overwritten."""
    num_rows, size = x.shape
    assert x.is_contiguous(), "rows must lie one behind the other"
    if num_rows > 0:
        act_kernel[(num_rows, cdiv(size, _ACT_TILE))](x, size, BN=_ACT_TILE, ACT=activation, num_warps=4)
    return x


OPS = FusedOps(
    add_rms_norm=add_rms_norm,
    rotate_and_write=rotate_and_write,
    rotate_heads=rotate_heads,
    rotate_and_write_latent=rotate_and_write_latent,
    act_and_mul=act_and_mul,
    times_sigmoid=times_sigmoid,
    add_layer_norm=add_layer_norm,
    layer_norm=layer_norm,
    rms_norm=rms_norm,
    sum_add_norm=sum_add_norm,
)  # all of these treat a row as if it were alone; PyTorch's own norm does not say so
