# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of some hundred rows with packed weights on Hopper GPUs, in Gluon: each weight is unpacked once for all rows
of a tile.

The weight is the left operand of the tensor cores' asynchronous products, out of registers, and the rows of x are the
right one, in shared memory. One warp copies words and rows by the GPU's copy engine (TMA) into a ring of stages; each
of two groups of four warps has 64 rows of the weight. While a part of a block is multiplied a group unpacks the next
one. Weights are multiplied by their scales when they are unpacked. Triton's interpreter cannot run Gluon; the tests of
this file need the GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from app.kernels.gemm.gluon_packed import activate
from app.kernels.gemm.triton_forms import ASSEMBLY, assembly, parts_of
from app.kernels.quick_launch import quick_launch

thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # as two versions of Triton name it

ROWS = gl.constexpr(64)  # of the weight, of a group: what one instruction of four warps takes
GROUPS = gl.constexpr(2)


def _scaled(form: str, kind: str, part: int) -> str:
    """Assembly for two words in $1: part `part` of them in $0, times two scales in $2, plus two offsets in $3."""
    body: str = ASSEMBLY.value[form, kind, part].strip().removeprefix("{").removesuffix("}").replace("$0", "d")
    return "{\n.reg .b32 d;" + body + f"\nfma.rn.{kind}x2 $0, d, $2, $3;\n}}"


SCALED = gl.constexpr(
    {
        (form, kind, part): _scaled(form, kind, part)
        for form, parts in (("e2m1", 4), ("nibble", 4), ("e4m3", 2), ("int8", 2))
        for kind in ("bf16", "f16")
        for part in range(parts)
    }
)


@gluon.jit
def copy_partition(
    d_x, d_words, x_smem, w_smem, ready, free, i_m, i_n, first, count, half,
    BM: gl.constexpr, RUN: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One warp: all stages."""
    BOX: gl.constexpr = d_words.block_shape[0]
    PIECES: gl.constexpr = GROUPS * ROWS // BOX
    pieces = w_smem._reinterpret(d_words.dtype, [STAGES * PIECES, BOX, RUN], d_words.layout)
    for i in range(count):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), (GROUPS * ROWS * RUN + BM * RUN * PARTS) * 2)
        for j in gl.static_range(PIECES):
            if GATED:  # of 16 rows eight are gate's and eight up's
                row = i_n * (GROUPS * ROWS // 2) + j // 2 * 8 + (half if j % 2 == 1 else 0)
            else:
                row = i_n * GROUPS * ROWS + j * BOX
            tma.async_copy_global_to_shared(
                d_words, [row, (first + i) * RUN], ready.index(stage), pieces.index(stage * PIECES + j)
            )
        for j in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                d_x, [i_m * BM, ((first + i) * PARTS + j) * RUN], ready.index(stage), x_smem.index(stage * PARTS + j)
            )


@gluon.jit
def scales_of(p_groups, block, o_n, m_n, num_scales, G: gl.constexpr, PER: gl.constexpr, DTYPE: gl.constexpr):
    """G scales of a block, [ROWS] each, as bits."""
    scales = gl.tuple(())
    for g in gl.static_range(G):
        if p_groups is None:
            b_scale = gl.full(o_n.shape, -0.0, DTYPE, o_n.type.layout)
        else:
            group = block * 0 if PER == 0 else (block * G + g) // PER
            b_scale = gl.load(p_groups + group * num_scales + o_n, mask=m_n, other=0.0).to(DTYPE)
        scales = scales + gl.tuple((b_scale.to(gl.int16, bitcast=True),))
    return scales


@gluon.jit
def numbers(b_words, b_scale, b_offset, PART: gl.constexpr, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """Part PART of b_words [ROWS, RUN] times its scale [ROWS] plus its offset, both as bits."""
    ASM: gl.constexpr = assembly(SCALED, FORM, DTYPE, PART, False)
    b_bits = gl.inline_asm_elementwise(
        ASM, "=r,r,r,r", [b_words, b_scale[:, None], b_offset[:, None]], dtype=gl.int16, is_pure=True, pack=2
    )  # fmt: skip
    return b_bits.to(DTYPE, bitcast=True)


@gluon.jit
def multiply_partition(
    GROUP: gl.constexpr, x_smem, w_smem, ready, free, done, p_scales, p_offsets, p_bias, p_squares, p_residual, p_norm,
    p_shares, p_arrived, p_out, p_rows, p_new_squares, T, N, K, stride_residual, num_scales, eps,
    i_m, i_n, i_split, first, count,
    BM: gl.constexpr, RUN: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr,
    G: gl.constexpr, PER: gl.constexpr, SCALE_ROWS: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
    P: gl.constexpr, BP: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Four warps: rows [GROUP * ROWS, (GROUP + 1) * ROWS) of the program's tile."""
    DTYPE: gl.constexpr = x_smem.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, A)
    o_row = gl.arange(0, ROWS, layout=ROW)
    if GATED:
        o_half = i_n * (GROUPS * ROWS // 2) + GROUP * (ROWS // 2) + o_row // 16 * 8 + o_row % 8
        o_n = gl.where(o_half < N // 2, (N // 2) * (o_row // 8 % 2) + o_half, N)
    else:
        o_n = (i_n * GROUPS + GROUP) * ROWS + o_row
    m_n = o_n < N
    o_scale = o_n // SCALE_ROWS
    scales = scales_of(p_scales, first, o_scale, m_n, num_scales, G, PER, DTYPE)
    offsets = scales_of(p_offsets, first, o_scale, m_n, num_scales, G, PER, DTYPE)
    b_acc = gl.zeros([ROWS, BM], gl.float32, MMA)
    for i in range(count):
        stage = i % STAGES
        following = first + gl.minimum(i + 1, count - 1)
        next_scales = scales_of(p_scales, following, o_scale, m_n, num_scales, G, PER, DTYPE)
        next_offsets = scales_of(p_offsets, following, o_scale, m_n, num_scales, G, PER, DTYPE)
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_words = w_smem.index(stage * GROUPS + GROUP).load(A)
        b_before = b_words
        for j in gl.static_range(PARTS):
            b_w = numbers(b_words, scales[j * G // PARTS], offsets[j * G // PARTS], j, FORM, DTYPE)
            b_x = x_smem.index(stage * PARTS + j).permute((1, 0))
            b_acc = warpgroup_mma(b_w, b_x, b_acc, is_async=True)
            if j > 0:
                warpgroup_mma_wait(1, deps=[b_before])
            b_before = b_w
        b_acc, b_before = warpgroup_mma_wait(0, deps=[b_acc, b_before])
        mbarrier.arrive(free.index(stage), count=1)
        scales = next_scales
        offsets = next_offsets
    mbarrier.arrive(done, count=1)
    is_last = True
    if SPLITS > 1:
        o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))[:, None]
        o_c = gl.arange(0, BM, layout=gl.SliceLayout(0, MMA))[None, :]
        i_tile = (i_n * GROUPS + GROUP) * gl.num_programs(0) + i_m
        p_own = p_shares + i_tile * (SPLITS * ROWS * BM) + (o_r * BM + o_c)
        gl.store(p_own + i_split * (ROWS * BM), b_acc)
        thread_barrier()  # all threads have stored before one of them says so
        arrived = gl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel")
        is_last = arrived == SPLITS - 1
        if is_last:
            thread_barrier()
            gl.store(p_arrived + i_tile, 0)  # for the next launch
            b_acc = gl.load(p_own, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                b_acc += gl.load(p_own + other * (ROWS * BM), cache_modifier=".cg")
    if is_last:
        finish(
            GROUP, b_acc, x_smem, done, p_scales, p_bias, p_squares, p_residual, p_norm, p_out, p_rows, p_new_squares,
            T, N, K, stride_residual, eps, i_m, i_n, BM, RUN, PARTS, STAGES, GATED, ACT, P, BP, MMA,
        )  # fmt: skip


@gluon.jit
def finish(
    GROUP: gl.constexpr, b_acc, x_smem, done, p_scales, p_bias, p_squares, p_residual, p_norm, p_out, p_rows,
    p_new_squares, T, N, K, stride_residual, eps, i_m, i_n,
    BM: gl.constexpr, RUN: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    ACT: gl.constexpr, P: gl.constexpr, BP: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Does what follows the product."""
    DTYPE: gl.constexpr = x_smem.dtype
    WIDTH: gl.constexpr = ROWS // 2 if GATED else ROWS
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    THREADS: gl.constexpr = BP if BP < 32 else 32
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // THREADS, THREADS], [4, 1], [1, 0])
    if p_squares is not None:
        o_t = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, SQUARES))[:, None]
        o_p = gl.arange(0, BP, layout=gl.SliceLayout(0, SQUARES))[None, :]
        b_squares = gl.load(p_squares + o_t * P + o_p, mask=(o_t < T) & (o_p < P), other=0.0)
        b_rms = gl.rsqrt(gl.sum(b_squares, 1) / K + eps)
        b_acc *= gl.convert_layout(b_rms, gl.SliceLayout(0, MMA))[None, :]
    if p_bias is not None:
        o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
        if GATED:
            o_half = i_n * (GROUPS * ROWS // 2) + GROUP * (ROWS // 2) + o_row // 16 * 8 + o_row % 8
            o_b = gl.where(o_half < N // 2, (N // 2) * (o_row // 8 % 2) + o_half, N)
        else:
            o_b = (i_n * GROUPS + GROUP) * ROWS + o_row
        b_acc += gl.load(p_bias + o_b, mask=o_b < N, other=0.0).to(gl.float32)[:, None]
    if GATED:
        b_both = gl.reshape(b_acc.to(DTYPE).to(gl.float32), [4, 2, 8, BM])
        b_gate, b_up = gl.split(gl.permute(b_both, (0, 2, 3, 1)))
        b_tile = gl.reshape(activate(b_gate, ACT) * b_up, [WIDTH, BM]).to(DTYPE)
    else:
        b_tile = b_acc.to(DTYPE)
    mbarrier.wait(done, 0)  # no group reads the rows of x any more
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * WIDTH, element_bitwidth=16, rank=2)
    place = x_smem._reinterpret(DTYPE, [STAGES * PARTS * RUN // WIDTH, BM, WIDTH], LAYOUT).index(GROUP)
    place.permute((1, 0)).store(b_tile)
    thread_barrier()
    b_out = place.load(OUT)
    o_m = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, OUT))
    o_c = (i_n * GROUPS + GROUP) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
    M: gl.constexpr = 2 if GATED else 1
    m = (o_m < T)[:, None] & (o_c < N // M)[None, :]
    o = o_m.to(gl.int64)[:, None] * (N // M) + o_c[None, :]
    if p_residual is not None:
        p_r = p_residual + o_m.to(gl.int64)[:, None] * stride_residual + o_c[None, :]
        b_out = (b_out.to(gl.float32) + gl.load(p_r, mask=m, other=0.0).to(gl.float32)).to(DTYPE)
    gl.store(p_out + o, b_out, mask=m)
    if p_norm is not None:
        b_total = b_out.to(gl.float32)  # the norm is that of what is stored
        b_norm = gl.load(p_norm + o_c, mask=o_c < N, other=0.0).to(gl.float32)[None, :]
        gl.store(p_rows + o, (b_total * b_norm).to(DTYPE), mask=m)
        b_sums = gl.sum(gl.where(m, b_total * b_total, 0.0), 1)
        gl.store(p_new_squares + o_m * (gl.num_programs(1) * GROUPS) + (i_n * GROUPS + GROUP), b_sums, mask=o_m < T)


@quick_launch
@gluon.jit(do_not_specialize=["T", "num_blocks"])
def wide_linear_kernel(
    d_x, d_words, p_scales, p_offsets, p_bias, p_squares, p_residual, p_norm, p_shares, p_arrived, p_out, p_rows,
    p_new_squares, T, N, K, stride_residual, num_scales, num_blocks, eps,
    BM: gl.constexpr, BK: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr,
    G: gl.constexpr, PER: gl.constexpr, ROWS_OF_SCALE: gl.constexpr, GATED: gl.constexpr, ACT: gl.constexpr,
    P: gl.constexpr, BP: gl.constexpr, REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of T, tiles of N, SPLITS): the same as `triton_packed.packed_linear_kernel`, but p_new_squares
    [T, 2 * tiles of N]."""
    PARTS: gl.constexpr = parts_of(FORM)
    RUN: gl.constexpr = BK // PARTS
    i_m, i_n, i_split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    each = gl.cdiv(num_blocks, SPLITS)
    first = i_split * each
    count = gl.minimum(each, num_blocks - first)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * RUN, element_bitwidth=16, rank=2)
    x_smem = gl.allocate_shared_memory(d_x.dtype, [STAGES * PARTS, BM, RUN], d_x.layout)
    w_smem = gl.allocate_shared_memory(gl.int16, [STAGES * GROUPS, ROWS, RUN], WORDS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS)
    mbarrier.init(done, count=GROUPS)
    fence_async_shared()
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    gl.warp_specialize(
        [
            (multiply_partition, (
                0, x_smem, w_smem, ready, free, done, p_scales, p_offsets, p_bias, p_squares, p_residual, p_norm,
                p_shares, p_arrived, p_out, p_rows, p_new_squares, T, N, K, stride_residual, num_scales, eps,
                i_m, i_n, i_split, first, count, BM, RUN, PARTS, STAGES, FORM, G, PER, ROWS_OF_SCALE, GATED, ACT,
                P, BP, SPLITS,
            )),
            (multiply_partition, (
                1, x_smem, w_smem, ready, free, done, p_scales, p_offsets, p_bias, p_squares, p_residual, p_norm,
                p_shares, p_arrived, p_out, p_rows, p_new_squares, T, N, K, stride_residual, num_scales, eps,
                i_m, i_n, i_split, first, count, BM, RUN, PARTS, STAGES, FORM, G, PER, ROWS_OF_SCALE, GATED, ACT,
                P, BP, SPLITS,
            )),
            (copy_partition, (
                d_x, d_words, x_smem, w_smem, ready, free, i_m, i_n, first, count, N // 2,
                BM, RUN, PARTS, STAGES, GATED,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
