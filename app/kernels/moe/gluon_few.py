# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of few pairs for each expert with weights of few bits on GPUs of NVIDIA's, in Gluon: words go from memory
straight to registers.

A thread loads 16 bytes of a row, which are what its part of a tensor core's operand is made of, some blocks ahead: no
shared memory, no barriers, every warp goes on for itself. Blocks come from the last, of which there may be a part only,
to the first, so that the loop has no masks. Numbers that are floats of few bits are left as small as their bits are as
a wider float, which saves an instruction for each two: x is multiplied by what is left out, which for eight rows is
less to do, and the sums by the rest. Triton's interpreter cannot run Gluon: the tests of this file need a GPU.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from app.kernels.gemm.stored import Form
from app.kernels.gemm.triton_forms import ASSEMBLY, RAW_EXPONENTS, assembly, parts_of, raw_exponent
from app.kernels.moe import GLU
from app.kernels.quick_launch import quick_launch

# What `triton_grouped` gives its kernel and this one has no use for.
NOT_IN_REGISTERS = frozenset(
    ("p_table", "SWAP", "TMA", "EVEN_N", "EVEN_K", "PRECISION", "WIDE", "TABLES", "ACT", "num_stages")
)
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # renamed from Triton 3.6 to 3.7


def serves_registers(rows: torch.Tensor, form: Form, activation: GLU | None) -> bool:
    """True if these kernels take rows of x [T, K], weights of a form, and an activation."""
    is_16_bit = rows.dtype in (torch.bfloat16, torch.float16) and rows.stride(0) % 8 == 0
    return is_16_bit and form != "table" and (activation is None or activation.function == "silu")


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def unpack(b_words, PART: gl.constexpr, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """Part PART of b_words [BN, RUN] as numbers; those of floats too small."""
    ASM: gl.constexpr = assembly(ASSEMBLY, FORM, DTYPE, PART, raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 1) > 0)
    b_bits = gl.inline_asm_elementwise(ASM, "=r,r", [b_words], dtype=gl.int16, is_pure=True, pack=2)
    return b_bits.to(DTYPE, bitcast=True)


@gluon.jit
def load_scales(p_s, block, num_scales, per, G: gl.constexpr):
    """Loads what a block's scales are made of: a tuple of as many as G, or of one where they lie in one number."""
    b_all = gl.tuple(())
    if p_s.dtype.element_ty == gl.int32:
        b_all = b_all + gl.tuple((gl.load(p_s + block * num_scales),))
    else:
        for g in gl.static_range(G):
            b_all = b_all + gl.tuple((gl.load(p_s + ((block * G + g) // per) * num_scales),))
    return b_all


@gluon.jit
def scale_of(scales, FIRST: gl.constexpr, g: gl.constexpr, IS_EXPONENT: gl.constexpr):
    """fp32 of scale g of the block whose scales begin at FIRST."""
    if IS_EXPONENT:
        b_bits = scales[FIRST]
        b_bits = b_bits << (23 - 8 * g) if g < 3 else b_bits >> 1
        b_scale = (b_bits & 0x7F800000).to(gl.float32, bitcast=True)
    else:
        b_scale = scales[FIRST + g].to(gl.float32)
    return b_scale


@gluon.jit
def load_blocks(p_w, p_s, first, num_scales, per, AHEAD: gl.constexpr, RUN: gl.constexpr, G: gl.constexpr):
    """Words and scales of AHEAD blocks from `first`, to which p_w points."""
    words = gl.tuple(())
    scales = gl.tuple(())
    for d in gl.static_range(AHEAD):
        words = words + gl.tuple((gl.load(p_w + d * RUN),))
        if G > 0:
            scales = scales + load_scales(p_s, first + d, num_scales, per, G)
    return words, scales


@gluon.jit
def add_blocks(
    b_acc, words, scales, p_rows, p_o, o_k, first, skip, left, num_scales, per,
    BM: gl.constexpr, BN: gl.constexpr, AHEAD: gl.constexpr, FORM: gl.constexpr, G: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """b_acc + the products of AHEAD blocks from `first`, to whose inputs p_rows points. MASKED: without the first
    `skip` of them; there are `left` inputs."""
    PARTS: gl.constexpr = parts_of(FORM)
    EACH: gl.constexpr = PARTS if G == 0 else PARTS // G
    MMA: gl.constexpr = b_acc.type.layout
    DTYPE: gl.constexpr = p_rows.dtype.element_ty
    A: gl.constexpr = words[0].type.layout
    B: gl.constexpr = p_rows.type.layout
    RUN: gl.constexpr = words[0].shape[1]
    UP: gl.constexpr = raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 0)
    IS_EXPONENT: gl.constexpr = G == 4 and len(scales) == AHEAD
    NUM_SCALES: gl.constexpr = 1 if IS_EXPONENT else G
    zeros = gl.zeros([BN, BM], gl.float32, MMA)
    ones = gl.full([BN, RUN], 1.0, DTYPE, A)
    for d in gl.static_range(AHEAD):
        b_part = zeros
        b_sum = zeros
        for j in gl.static_range(PARTS):
            at = (d * PARTS + j) * RUN
            if MASKED:
                b_x = gl.load(p_rows + at, mask=(o_k < left - at) & (skip <= d), other=0.0)
            else:
                b_x = gl.load(p_rows + at)
            if UP > 0:
                b_x *= gl.full([RUN, BM], 2.0**UP, DTYPE, B)
            b_w = unpack(words[d], j, FORM, DTYPE)
            if G == 0:
                b_acc = mma_v2(b_w, b_x, b_acc)
            else:
                b_part = mma_v2(b_w, b_x, b_part)
            if p_o is not None:
                b_sum = mma_v2(ones, b_x, b_sum)
            if G > 0 and (j + 1) % EACH == 0:
                b_acc += b_part * scale_of(scales, d * NUM_SCALES, j // EACH, IS_EXPONENT)[:, None]
                b_part = zeros
                if p_o is not None:
                    b_offset = gl.load(p_o + (((first + d) * G + j // EACH) // per) * num_scales)
                    b_acc += b_sum * b_offset.to(gl.float32)[:, None]
                    b_sum = zeros
    return b_acc


@gluon.jit
def products(
    p_x, p_words, p_scales, p_offsets, o_n, b_row, first, count, K, row, stride_x, num_scales, per,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, AHEAD: gl.constexpr, FORM: gl.constexpr, G: gl.constexpr,
    ROWS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """fp32 [BN, BM] in the layout MMA: rows o_n of a weight (`StoredTiles`) times rows b_row of x, over `count` blocks
    from `first`, at least AHEAD.

    G: parts of a block with a scale for each, which holds for `per` such parts; 0: one for a row.
    """
    RUN: gl.constexpr = BK // parts_of(FORM)
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    WIDTH: gl.constexpr = min(8, RUN // 4)
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    o_a = gl.convert_layout(o_n, gl.SliceLayout(1, A))
    o_k = gl.arange(0, RUN, layout=gl.SliceLayout(1, B))[:, None]
    p_w = p_words + o_a[:, None] * row + gl.arange(0, RUN, layout=gl.SliceLayout(0, A))[None, :]
    p_rows = p_x + gl.convert_layout(b_row, gl.SliceLayout(0, B))[None, :].to(gl.int64) * stride_x + o_k
    o_scale = o_n // ROWS
    p_s = p_scales + o_scale
    p_o = p_offsets
    if p_offsets is not None:
        p_o = p_offsets + o_scale
    chunks = (count - 1) // AHEAD
    rest = count - chunks * AHEAD  # 1 .. AHEAD blocks at the end, which come first
    end = first + count
    words, scales = load_blocks(p_w + (end - AHEAD) * RUN, p_s, end - AHEAD, num_scales, per, AHEAD, RUN, G)
    at = end - rest - AHEAD
    after = gl.maximum(at, first)
    next_words, next_scales = load_blocks(p_w + after * RUN, p_s, after, num_scales, per, AHEAD, RUN, G)
    b_acc = add_blocks(
        gl.zeros([BN, BM], gl.float32, MMA), words, scales, p_rows + (end - AHEAD) * BK, p_o, o_k, end - AHEAD,
        AHEAD - rest, K - (end - AHEAD) * BK, num_scales, per, BM, BN, AHEAD, FORM, G, True,
    )  # fmt: skip
    for _ in range(chunks):
        words, scales = next_words, next_scales
        after = gl.maximum(at - AHEAD, first)
        next_words, next_scales = load_blocks(p_w + after * RUN, p_s, after, num_scales, per, AHEAD, RUN, G)
        b_acc = add_blocks(
            b_acc, words, scales, p_rows + at * BK, p_o, o_k, at, 0, 0, num_scales, per, BM, BN, AHEAD, FORM, G, False
        )
        at -= AHEAD
    UP: gl.constexpr = raw_exponent(RAW_EXPONENTS, FORM, DTYPE, 1)
    if UP > 0:
        b_acc *= 2.0**UP
    if G == 0:
        b_acc *= gl.load(p_s).to(gl.float32)[:, None]
    return b_acc


@gluon.jit
def gated(b_gate, b_up, limit, alpha, up_offset, HAS_LIMIT: gl.constexpr):
    """SiLU's gated activation (`GLU`)."""
    if HAS_LIMIT:
        b_gate = gl.minimum(b_gate, limit)
        b_up = gl.minimum(gl.maximum(b_up, -limit), limit)
    return b_gate / (1.0 + gl.exp(-alpha * b_gate)) * (b_up + up_offset)


@quick_launch
@gluon.jit(do_not_specialize=["num_pairs"])
def few_product_kernel(
    p_x, weight, p_scales, p_offsets, p_bias, p_squares, p_weights, p_ids, p_out, p_shares, p_arrived, num_pairs,
    N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset,
    DIV: gl.constexpr, BPAIRS: gl.constexpr, BY_PAIR: gl.constexpr, P: gl.constexpr, BP: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GATED: gl.constexpr, HAS_LIMIT: gl.constexpr,
    FORM: gl.constexpr, G: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr, AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """The same as `triton_grouped.scan_product_kernel`."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, NUM_WARPS], [1, 0])
    PAIR: gl.constexpr = gl.SliceLayout(0, PAIRS)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    ALL: gl.constexpr = 2 if GATED else 1
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    i_n, i_e, i_split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    o_pair = gl.arange(0, BPAIRS, layout=PAIR)
    b_ids = gl.load(p_ids + o_pair, mask=o_pair < num_pairs, other=-1)
    if BY_PAIR:
        i_pair = i_e
        i_e = gl.load(p_ids + i_pair)
        if (i_e < 0) | (gl.min(gl.where(b_ids == i_e, o_pair, BPAIRS), 0) < i_pair):
            return
    b_mine = (b_ids == i_e).to(gl.int32)
    b_rank = gl.convert_layout(gl.associative_scan(gl.convert_layout(b_mine, LINE), 0, _add), PAIR) - 1
    total = gl.sum(b_mine, 0)
    o_row = gl.arange(0, BN * ALL, layout=ROW)
    if GATED:  # of 16 rows the first eight are gate's, the others up's: a thread has both of a number
        o_half = i_n * BN + o_row // 16 * 8 + o_row % 8
        m_n = o_half < N
        o_n = gl.where(m_n, N * (o_row // 8 % 2) + o_half, 0)
    else:
        m_n = i_n * BN + o_row < N
        o_n = gl.where(m_n, i_n * BN + o_row, 0)
    weight += i_e.to(gl.int64) * (ALL * N) * row
    o_groups = i_e.to(gl.int64) * num_groups * num_scales
    if p_offsets is not None:
        p_offsets += o_groups
    each = gl.cdiv(num_blocks, SPLITS)
    for start in range(0, total, BM):
        o_own = start + gl.arange(0, BM, layout=gl.SliceLayout(1, PAIRS))
        b_hit = (b_mine[None, :] == 1) & (b_rank[None, :] == o_own[:, None])
        b_pair = gl.convert_layout(gl.sum(gl.where(b_hit, o_pair[None, :], 0), 1), COLUMN)
        m_m = start + gl.arange(0, BM, layout=COLUMN) < total
        b_acc = products(
            p_x, weight, p_scales + o_groups, p_offsets, o_n, b_pair // DIV, i_split * each,
            gl.minimum(each, num_blocks - i_split * each), K, row, stride_x, num_scales, per, BM, BN * ALL, BK, AHEAD,
            FORM, G, ROWS, MMA,
        )  # fmt: skip
        if SPLITS > 1:  # there is one round then
            m, o = m_m[None, :] & m_n[:, None], b_pair[None, :].to(gl.int64) * (ALL * N) + o_n[:, None]
            size = num_pairs.to(gl.int64) * (ALL * N)
            gl.store(p_shares + i_split * size + o, b_acc, mask=m)
            thread_barrier()  # all threads have stored before one of them says so
            p_count = p_arrived + gl.program_id(1) * gl.num_programs(0) + i_n
            is_last = gl.atomic_add(p_count, 1, sem="acq_rel") == SPLITS - 1
            thread_barrier()
            gl.store(p_count, 0, mask=is_last)  # for the next launch
            m_m = m_m & is_last
            b_acc = gl.load(p_shares + o, mask=m & is_last, other=0.0, cache_modifier=".cg")
            for i in gl.static_range(1, SPLITS):
                b_acc += gl.load(p_shares + i * size + o, mask=m & is_last, other=0.0, cache_modifier=".cg")
        if p_squares is not None:
            b_row = gl.convert_layout(b_pair // DIV, gl.SliceLayout(1, SQUARES))[:, None]
            o_p = gl.arange(0, BP, layout=gl.SliceLayout(0, SQUARES))[None, :]
            b_squares = gl.load(p_squares + b_row * P + o_p, mask=o_p < P, other=0.0)
            b_acc *= gl.convert_layout(gl.rsqrt(gl.sum(b_squares, 1) / K + eps), COLUMN)[None, :]
        if p_weights is not None:
            b_acc *= gl.load(p_weights + b_pair, mask=m_m, other=0.0)[None, :]
        if p_bias is not None:
            b_acc += gl.load(p_bias + i_e * (ALL * N) + o_n, mask=m_n, other=0.0).to(gl.float32)[:, None]
        if GATED:
            b_gate, b_up = gl.split(gl.permute(gl.reshape(b_acc, [BN // 8, 2, 8, BM]), (0, 2, 3, 1)))
            b_out = gl.reshape(gated(b_gate, b_up, limit, alpha, up_offset, HAS_LIMIT), [BN, BM])
        else:
            b_out = b_acc
        OUT: gl.constexpr = b_out.type.layout
        o_c = i_n * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, OUT))[:, None]
        b_to = gl.convert_layout(b_pair, gl.SliceLayout(0, OUT))[None, :].to(gl.int64) * N
        m_to = gl.convert_layout(m_m, gl.SliceLayout(0, OUT))[None, :]
        gl.store(p_out + b_to + o_c, b_out.to(p_out.dtype.element_ty), mask=m_to & (o_c < N))
