# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products on a GPU whose rows do not depend, to the bit, on how many there are (the option `deterministic`).

A number of the result is one sum, from the first input to the last, of groups of 16 products that a tensor core adds
to it at once. So tiles may be of any height and width, and of any depth that is a multiple of 16; K is never split, and
zeros fill a tile up, which change no sum. On an H200 all instructions that Triton chose for such tiles gave the same
bits, whichever side was the weight (SWAP: where rows are few), and so did cuBLAS but where it split K. ("Batch
invariance": He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from app.kernels.fused import GatedActivation
from app.kernels.fused.triton_ops import act_and_mul, activate, add_rms_norm
from app.kernels.gemm import Activations, Inputs, materialize
from app.kernels.gemm.composed import composed
from app.kernels.launch import cdiv, early_launch, multiprocessors, shared_memory
from app.kernels.quick_launch import quick_launch

_ALIGNED = 16  # bytes: the copy engine's
_NEIGHBOURS = 8  # tiles of rows that are multiplied by the same columns one after another, while these are in the cache


@dataclass(slots=True, frozen=True)
class FixedTile:
    """Tile sizes and launch options of the kernel."""

    rows: int
    columns: int  # of gate and up: so many of each
    depth: int
    num_warps: int
    num_stages: int
    swap: bool = False  # weight times rows, instead of rows times weight
    programs: int = 1  # of the grid, for each multiprocessor, at most


# Up to so many rows: the tile, and that of gate and up, whose two sums take twice as many registers.
FEW: tuple[tuple[int, FixedTile, FixedTile], ...] = (
    (16, FixedTile(16, 64, 128, 4, 6, swap=True, programs=2), FixedTile(16, 64, 128, 4, 4, swap=True, programs=2)),
    (32, FixedTile(32, 64, 128, 4, 6, swap=True, programs=2), FixedTile(32, 64, 128, 4, 4, swap=True, programs=2)),
    (64, FixedTile(64, 64, 128, 4, 4, swap=True, programs=2), FixedTile(64, 64, 64, 4, 4, swap=True, programs=2)),
)
# Beyond: tiles, and how long a multiprocessor of an H200 takes for one of 4,096 inputs, in us (2026-11-28).
MANY: tuple[tuple[float, FixedTile], ...] = (
    (43.0, FixedTile(128, 256, 64, 8, 3)),
    (26.0, FixedTile(128, 128, 64, 8, 4)),
    (20.0, FixedTile(128, 64, 64, 4, 5, swap=True, programs=2)),
    (13.0, FixedTile(64, 64, 128, 4, 5, swap=True, programs=2)),
)
MANY_GATED: tuple[tuple[float, FixedTile], ...] = (
    (43.0, FixedTile(128, 128, 64, 8, 3)),
    (26.0, FixedTile(128, 64, 64, 8, 4)),
)


def tile_for(num_rows: int, columns: int, num_sms: int, *, is_gated: bool) -> FixedTile:
    """The tile of a product of so many rows and columns on so many multiprocessors; of many rows the one whose rounds
    take the least time."""
    for most, tile, gated in FEW:
        if num_rows <= most:
            return gated if is_gated else tile

    def seconds(timed: tuple[float, FixedTile]) -> float:
        cost, tile = timed
        return cost * cdiv(cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns), num_sms)

    return min(MANY_GATED if is_gated else MANY, key=seconds)[1]


def leaf_tile_for(num_rows: int, columns: int, num_sms: int) -> FixedTile:
    """The same of a product over leaves: its tree holds up to three sums, for which the widest has no registers."""
    tile = tile_for(num_rows, columns, num_sms, is_gated=False)
    return MANY[1][1] if tile == MANY[0][1] else tile


@triton.jit
def load_tile(source, i_row, o_row, i_k, o_k, num_rows, K, stride, TMA: tl.constexpr, EVEN_K: tl.constexpr):
    """Rows o_row, from i_row on, and columns o_k from i_k on; zeros where there are none."""
    if TMA:
        b = source.load([i_row, i_k])
    else:
        p = source + o_row[:, None].to(tl.int64) * stride + (i_k + o_k)[None, :]
        if EVEN_K:
            b = tl.load(p, mask=o_row[:, None] < num_rows, other=0.0)
        else:
            b = tl.load(p, mask=(o_row[:, None] < num_rows) & (i_k + o_k < K)[None, :], other=0.0)
    return b


@triton.jit
def add_product(b_acc, b_x, b_w, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """b_acc + x [BM, BK] times w [BN, BK]: [BM, BN], or with SWAP [BN, BM]."""
    if SWAP:
        b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision=PRECISION)
    else:
        b_acc = tl.dot(b_x, tl.trans(b_w), b_acc, input_precision=PRECISION)
    return b_acc


@triton.jit
def add_bias(b_acc, p_bias, o_n, num_columns, SWAP: tl.constexpr):
    """b_acc [BM, BN], or with SWAP [BN, BM], plus the bias of columns o_n."""
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_n, mask=o_n < num_columns, other=0.0).to(tl.float32)
        if SWAP:
            b_acc += b_bias[:, None]
        else:
            b_acc += b_bias[None, :]
    return b_acc


@quick_launch
@triton.jit(do_not_specialize=["T"])
def fixed_linear_kernel(
    rows, weight, p_bias, p_out, T, N, K, stride_x,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr, SWAP: tl.constexpr,
    TMA: tl.constexpr, EVEN_K: tl.constexpr, NEIGHBOURS: tl.constexpr, PRECISION: tl.constexpr, LEAVES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,), which share the tiles: p_out [T, N] = rows [T, LEAVES K] times weight [LEAVES, N, K], the tree
    over the leaves' sums; GATED, of one leaf, of gate and up [2 N, K]."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tiles_m, tiles_n = tl.cdiv(T, BM), tl.cdiv(N, BN)
    group = NEIGHBOURS * tiles_n
    o_k = tl.arange(0, BK)
    HEIGHT: tl.constexpr = BN if SWAP else BM
    WIDTH: tl.constexpr = BM if SWAP else BN
    for i in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        i_first = i // group * NEIGHBOURS
        height = tl.minimum(tiles_m - i_first, NEIGHBOURS)
        i_m, i_n = i_first + i % group % height, i % group // height
        o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
        b_acc = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
        b_up = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
        for i_k in range(0, K, BK):
            b_x = load_tile(rows, i_m * BM, o_m, i_k, o_k, T, K, stride_x, TMA, EVEN_K)
            b_w = load_tile(weight, i_n * BN, o_n, i_k, o_k, N, K, K, TMA, EVEN_K)
            b_acc = add_product(b_acc, b_x, b_w, SWAP, PRECISION)
            if GATED:
                b_w = load_tile(weight, N + i_n * BN, N + o_n, i_k, o_k, 2 * N, K, K, TMA, EVEN_K)
                b_up = add_product(b_up, b_x, b_w, SWAP, PRECISION)
        b_acc = add_bias(b_acc, p_bias, o_n, N, SWAP)
        if GATED and p_bias is not None:
            b_up = add_bias(b_up, p_bias + N, o_n, N, SWAP)
        for leaf in tl.static_range(1, LEAVES):
            b_leaf = tl.zeros([HEIGHT, WIDTH], dtype=tl.float32)
            for i_k in range(0, K, BK):
                # Beyond its end a leaf's weight is 0, whatever x holds there.
                b_x = load_tile(rows, i_m * BM, o_m, leaf * K + i_k, o_k, T, (leaf + 1) * K, stride_x, TMA, EVEN_K)
                b_w = load_tile(
                    weight, leaf * N + i_n * BN, leaf * N + o_n, i_k, o_k, (leaf + 1) * N, K, K, TMA, EVEN_K
                )
                b_leaf = add_product(b_leaf, b_x, b_w, SWAP, PRECISION)
            if leaf % 2 == 0:
                b_up = b_leaf  # it waits for its neighbour
            elif leaf == 1:
                b_acc += b_leaf
            else:
                b_acc += b_up + b_leaf
        if SWAP:
            b_acc = tl.trans(b_acc)
            b_up = tl.trans(b_up)
        m_n = o_n < N
        if GATED:
            # Rounded in between, as where the two are written and read again.
            b_acc = b_acc.to(p_out.dtype.element_ty).to(tl.float32)
            b_acc = activate(b_acc, ACT) * b_up.to(p_out.dtype.element_ty).to(tl.float32)
        p_o = p_out + o_m[:, None].to(tl.int64) * N + o_n[None, :]
        tl.store(p_o, b_acc.to(p_out.dtype.element_ty), mask=(o_m[:, None] < T) & m_n[None, :])


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: GatedActivation | None = None,
    tile: FixedTile | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] (with an activation, gate and up: [2 N, K]) transposed, plus bias: [T, N]."""
    (num_rows, size), num_weights = x.shape, 2 if activation else 1
    columns = weight.shape[0] // num_weights
    assert x.stride(1) == weight.stride(1) == 1, "rows must be contiguous"
    assert weight.stride(0) == size, "the weight must be contiguous"
    out = torch.empty(num_rows, columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    sms = multiprocessors(x.device)
    tile = tile or tile_for(num_rows, columns, sms, is_gated=activation is not None)
    _launch(x, weight, bias, out, columns, tile, activation)
    return out


def sum_leaves(x: torch.Tensor, leaves: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """A LeafProduct (leaves.py): the tree lies in a program's registers."""
    num_leaves, columns, _ = leaves.shape
    assert x.stride(1) == 1, "rows must be contiguous"
    assert num_leaves in (1, 2, 4), "the tree's branches are written out for so many"
    assert leaves.is_contiguous(), "the leaves must be contiguous"
    out = torch.empty(len(x), columns, dtype=dtype, device=x.device)
    if len(x) > 0:
        tile = leaf_tile_for(len(x), columns, multiprocessors(x.device))
        _launch(x, leaves.flatten(0, 1), bias, out, columns, tile, None, num_leaves)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    columns: int,
    tile: FixedTile,
    activation: GatedActivation | None,
    num_leaves: int = 1,
) -> None:
    """x [T, L K] times weight [L columns, K] into out [T, columns]; with an activation, gate and up [2 columns, K]."""
    num_rows, size, sms = len(x), weight.shape[1], multiprocessors(x.device)
    num_weights = 2 if activation else 1
    is_tma = all(_is_aligned(one) for one in (x, weight))
    each = (tile.rows + num_weights * tile.columns) * tile.depth * x.element_size()  # bytes of a stage
    fixed_linear_kernel[(min(cdiv(num_rows, tile.rows) * cdiv(columns, tile.columns), tile.programs * sms),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]) if is_tma else x,
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]) if is_tma else weight,
        bias, out, num_rows, columns, size, x.stride(0),
        BM=tile.rows, BN=tile.columns, BK=tile.depth, GATED=activation is not None, ACT=activation or "silu",
        SWAP=tile.swap, TMA=is_tma, EVEN_K=size % tile.depth == 0, NEIGHBOURS=_NEIGHBOURS,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", LEAVES=num_leaves, num_warps=tile.num_warps,
        num_stages=max(1, min(tile.num_stages, shared_memory(x.device) // each)), **early_launch(x.device),
    )  # fmt: skip


def _is_aligned(x: torch.Tensor) -> bool:
    """True if the copy engine takes such rows."""
    return x.data_ptr() % _ALIGNED == 0 and x.stride(0) * x.element_size() % _ALIGNED == 0


def linear(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same as `reference.linear`."""
    return fixed_linear(materialize(x), weight, bias)


def gated_linear(
    x: Activations, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
) -> torch.Tensor:
    """The same as `reference.OPS.gated_linear`."""
    return fixed_linear(materialize(x), weight, bias, activation)


OPS = replace(composed(linear, act_and_mul, add_rms_norm), gated_linear=gated_linear)
