# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a few rows with packed weights on GPUs of NVIDIA's, written in Gluon: `triton_packed` for a decode step.

Warps share a tile's inputs as splits share them there, and their sums meet in shared memory: one program makes a tile,
none waits for another. A thread loads 16 bytes of a row, which hold what its part of a tensor core's operand is made
of, some blocks ahead; the first of them before the kernel in front has ended, which writes no weights. The next kernel
may start while sums are put together.

Nibbles are put over the mantissa of 128 (1024 in fp16) and multiplied as that: one instruction less for two of them.
What is too much, and a zero point, is a multiple of the sum of a group's inputs, which a product with ones gives: zero
points cost little. Entries of a table are picked byte by byte out of registers. Triton's interpreter cannot run Gluon;
the tests of this file need the GPU.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from app.kernels.gemm.triton_forms import ASSEMBLY, LOOK_UP, LOOK_UP_CONSTRAINTS, assembly, moved_by, parts_of
from app.kernels.quick_launch import quick_launch


@gluon.jit
def unpack(b_words, PART: gl.constexpr, FORM: gl.constexpr, DTYPE: gl.constexpr):
    """Part PART of b_words [DEEP, BN, RUN] as numbers; of nibbles `moved_by` too large."""
    ASM: gl.constexpr = assembly(ASSEMBLY, "moved" if FORM == "nibble" else FORM, DTYPE, PART, False)
    b_bits = gl.inline_asm_elementwise(ASM, "=r,r", [b_words], dtype=gl.int16, is_pure=True, pack=2)
    return b_bits.to(DTYPE, bitcast=True)


@gluon.jit
def table_entries(p_table, o_n, m_n, TABLES: gl.constexpr):
    """Eight int32 like o_n: the higher bytes of a table's 16 entries, four in each, then the lower ones; p_table int32
    [8], or TABLES [N, 8]."""
    p_entries = p_table + o_n * (8 if TABLES else 0)
    entries = gl.tuple(())
    for i in gl.static_range(8):
        b_0 = gl.load(p_entries + 2 * i % 8, mask=m_n, other=0)
        b_1 = gl.load(p_entries + 2 * i % 8 + 1, mask=m_n, other=0)
        entries = entries + gl.tuple((bytes_of_four(b_0, b_1, i < 4),))
    return entries


@gluon.jit
def bytes_of_four(b_0, b_1, HIGH: gl.constexpr):
    """The higher or lower bytes of four numbers of 16 bits in two registers."""
    ASM: gl.constexpr = "prmt.b32 $0, $1, $2, 0x7531;" if HIGH else "prmt.b32 $0, $1, $2, 0x6420;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [b_0, b_1], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def look_up(b_words, entries, DTYPE: gl.constexpr):
    """All four parts of b_words [DEEP, BN, RUN] as entries of a table (`table_entries`)."""
    b_0, b_1, b_2, b_3 = gl.inline_asm_elementwise(
        LOOK_UP, LOOK_UP_CONSTRAINTS,
        [b_words, entries[0], entries[1], entries[2], entries[3], entries[4], entries[5], entries[6], entries[7]],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=2,
    )  # fmt: skip
    return (
        b_0.to(DTYPE, bitcast=True), b_1.to(DTYPE, bitcast=True), b_2.to(DTYPE, bitcast=True),
        b_3.to(DTYPE, bitcast=True),
    )  # fmt: skip


@gluon.jit
def rows_of(i_n, N, BN: gl.constexpr, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """The weight's rows of a tile. Of gate and up 16 rows hold eight of each: a thread has both of a number."""
    o_row = gl.arange(0, BN, layout=LAYOUT)
    if GATED:
        o_half = i_n * (BN // 2) + o_row // 16 * 8 + o_row % 8
        o_n = gl.where(o_half < N // 2, (N // 2) * (o_row // 8 % 2) + o_half, N)
    else:
        o_n = i_n * BN + o_row
    return o_n


@gluon.jit
def scales_of(p_groups, block, o_n, m_n, num_blocks, num_scales, G: gl.constexpr, PER: gl.constexpr):
    """G scales of a block [DEEP, 1], [DEEP, BN] each; none without p_groups."""
    scales = gl.tuple(())
    for g in gl.static_range(0 if p_groups is None else G):
        group = block * 0 if PER == 0 else (block * G + g) // PER
        b_scale = gl.load(p_groups + group * num_scales + o_n, mask=m_n & (block < num_blocks), other=0.0)
        scales = scales + gl.tuple((b_scale,))
    return scales


@gluon.jit
def products(
    p_x, p_words, p_scales, p_offsets, p_table, i_n, i_m, num_blocks, T, N, K, row, stride_x, num_scales,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, DEEP: gl.constexpr, AHEAD: gl.constexpr, FORM: gl.constexpr,
    G: gl.constexpr, PER: gl.constexpr, ROWS: gl.constexpr, TABLES: gl.constexpr, GATED: gl.constexpr,
    EVEN_K: gl.constexpr, MMA: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """fp32 [DEEP, BN, BM]: see `triton_packed.packed_products`. DEEP groups of warps take a block each in turn; PER
    parts of a block share a scale, 0: all do."""
    PARTS: gl.constexpr = parts_of(FORM)
    RUN: gl.constexpr = BK // PARTS
    EACH: gl.constexpr = PARTS if G == 0 else PARTS // G
    DTYPE: gl.constexpr = p_x.dtype.element_ty
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, min(8, RUN // 4))
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, min(8, RUN // 4))
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    SUMS: gl.constexpr = G > 0 and (FORM == "nibble" or p_offsets is not None)
    o_n = rows_of(i_n, N, BN, GATED, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    o_w = gl.arange(0, DEEP, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None, None]
    o_j = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    p_w = p_words + o_n.to(gl.int64) * row + (o_w * RUN + o_j)
    m_w = o_n < N
    entries = gl.tuple(())
    if FORM == "table":
        entries = table_entries(p_table, o_n, m_w, TABLES)
    o_m = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    o_x = gl.arange(0, DEEP, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    o_k = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    p_row = p_x + o_m.to(gl.int64) * stride_x + (o_x * BK + o_k)
    m_m = o_m < T
    o_s = gl.arange(0, DEEP, layout=gl.SliceLayout(1, ROW))[:, None]
    o_scale = rows_of(i_n, N, BN, GATED, gl.SliceLayout(0, ROW))[None, :]
    m_s = o_scale < N
    o_scale //= ROWS
    words = gl.tuple(())
    scales = gl.tuple(())
    offsets = gl.tuple(())
    for d in gl.static_range(AHEAD):
        m_first = m_w & (d * DEEP + o_w < num_blocks)
        b_first = gl.load(p_w + d * DEEP * RUN, mask=m_first, other=0, eviction_policy="evict_first")
        words = words + gl.tuple((b_first,))
        scales = scales + scales_of(p_scales, d * DEEP + o_s, o_scale, m_s, num_blocks, num_scales, G, PER)
        offsets = offsets + scales_of(p_offsets, d * DEEP + o_s, o_scale, m_s, num_blocks, num_scales, G, PER)
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    b_ones = gl.full([DEEP, BN, RUN], 1.0, DTYPE, A)
    zeros = gl.zeros([DEEP, BN, BM], gl.float32, MMA)
    b_acc = zeros
    for start in range(0, num_blocks, AHEAD * DEEP):
        next_words = gl.tuple(())
        next_scales = gl.tuple(())
        next_offsets = gl.tuple(())
        for d in gl.static_range(AHEAD):
            block = start + d * DEEP
            later = block + AHEAD * DEEP
            b_words = words[d]
            m_next = m_w & (later + o_w < num_blocks)
            b_next = gl.load(p_w + later * RUN, mask=m_next, other=0, eviction_policy="evict_first")
            next_words = next_words + gl.tuple((b_next,))
            next_scales = next_scales + scales_of(
                p_scales, later + o_s, o_scale, m_s, num_blocks, num_scales, G, PER
            )  # fmt: skip
            next_offsets = next_offsets + scales_of(
                p_offsets, later + o_s, o_scale, m_s, num_blocks, num_scales, G, PER
            )  # fmt: skip
            if FORM == "table":
                parts = look_up(b_words, entries, DTYPE)
            b_part = zeros
            b_sum = zeros
            for j in gl.static_range(PARTS):
                if EVEN_K:
                    m_x = m_m & (block + o_x < num_blocks)
                else:
                    m_x = m_m & (block * BK + j * RUN + (o_x * BK + o_k) < K)
                b_x = gl.load(p_row + (block * BK + j * RUN), mask=m_x, other=0.0)
                if FORM == "table":
                    b_w = parts[j]
                else:
                    b_w = unpack(b_words, j, FORM, DTYPE)
                if G == 0:
                    b_acc = mma_v2(b_w, b_x, b_acc)
                else:
                    b_part = mma_v2(b_w, b_x, b_part)
                if SUMS:
                    b_sum = mma_v2(b_ones, b_x, b_sum)
                if G > 0 and (j + 1) % EACH == 0:
                    b_scale = scales[d * G + j // EACH].to(gl.float32)[:, :, None]
                    b_acc += b_part * b_scale
                    if SUMS:
                        b_less = b_scale * (-moved_by(DTYPE) if FORM == "nibble" else 0.0)
                        if p_offsets is not None:
                            b_less += offsets[d * G + j // EACH].to(gl.float32)[:, :, None]
                        b_acc += b_sum * b_less
                    b_part = zeros
                    b_sum = zeros
        words = next_words
        scales = next_scales
        offsets = next_offsets
    return b_acc


@gluon.jit
def activate(b_x, ACT: gl.constexpr):
    """See `fused.triton_ops.activate`."""
    if ACT == "gelu":
        b_y = 0.5 * b_x * (1.0 + gl.erf(b_x * 0.7071067811865476))
    else:
        b_z = b_x
        if ACT == "gelu_tanh":
            b_z = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_y = b_x / (1.0 + gl.exp(-b_z))
    return b_y


@gluon.jit
def store_gated(p_out, b_out, i_n, i_m, T, N, BM: gl.constexpr, BN: gl.constexpr, ACT: gl.constexpr):
    """activation(gate) * up of a tile [BN, BM] as `rows_of` orders it."""
    b_both = gl.reshape(b_out.to(gl.float32), [BN // 16, 2, 8, BM])
    b_gate, b_up = gl.split(gl.permute(b_both, (0, 2, 3, 1)))
    b_gate = gl.reshape(activate(b_gate, ACT) * b_up, [BN // 2, BM])
    HALF: gl.constexpr = b_gate.type.layout
    o_m = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, HALF))[None, :]
    o_n = i_n * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, HALF))[:, None]
    p = p_out + o_m.to(gl.int64) * (N // 2) + o_n
    gl.store(p, b_gate.to(p_out.dtype.element_ty), mask=(o_m < T) & (o_n < N // 2))


@quick_launch
@gluon.jit(do_not_specialize=["T", "num_blocks"])
def streamed_linear_kernel(
    p_x, p_words, p_scales, p_offsets, p_table, p_bias, p_squares, p_residual, p_norm, p_out, p_rows, p_new_squares,
    T, N, K, row, stride_x, stride_residual, num_scales, num_blocks, eps,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, DEEP: gl.constexpr, AHEAD: gl.constexpr,
    FORM: gl.constexpr, G: gl.constexpr, PER: gl.constexpr, ROWS: gl.constexpr, TABLES: gl.constexpr,
    GATED: gl.constexpr, ACT: gl.constexpr, P: gl.constexpr, BP: gl.constexpr, EVEN_K: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, tiles of T): the same as `triton_packed.packed_linear_kernel`."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [DEEP, NUM_WARPS // DEEP, 1], [1, 16, 8])
    SUM: gl.constexpr = gl.SliceLayout(0, MMA)
    SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NUM_WARPS, 1], [1, 0])
    i_n, i_m = gl.program_id(0), gl.program_id(1)
    b_acc = products(
        p_x, p_words, p_scales, p_offsets, p_table, i_n, i_m, num_blocks, T, N, K, row, stride_x, num_scales,
        BM, BN, BK, DEEP, AHEAD, FORM, G, PER, ROWS, TABLES, GATED, EVEN_K, MMA, EARLY,
    )  # fmt: skip
    if EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    if p_squares is not None:
        o_t = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(1, SQUARES))[:, None]
        o_p = gl.arange(0, BP, layout=gl.SliceLayout(0, SQUARES))[None, :]
        b_squares = gl.load(p_squares + o_t * P + o_p, mask=(o_t < T) & (o_p < P), other=0.0)
    b_acc = gl.sum(b_acc, 0)
    o_n = rows_of(i_n, N, BN, GATED, gl.SliceLayout(1, SUM))
    o_m = i_m * BM + gl.arange(0, BM, layout=gl.SliceLayout(0, SUM))
    m_n = o_n < N
    m = (o_m < T)[None, :] & m_n[:, None]
    o = o_m[None, :].to(gl.int64) * N + o_n[:, None]
    if G == 0:
        b_acc *= gl.load(p_scales + o_n // ROWS, mask=m_n, other=0.0).to(gl.float32)[:, None]
    if p_squares is not None:
        b_rms = gl.rsqrt(gl.sum(b_squares, 1) / K + eps)
        b_acc *= gl.convert_layout(b_rms, gl.SliceLayout(0, SUM))[None, :]
    if p_bias is not None:
        b_acc += gl.load(p_bias + o_n, mask=m_n, other=0.0).to(gl.float32)[:, None]
    b_out = b_acc.to(p_out.dtype.element_ty)
    if GATED:
        store_gated(p_out, b_out, i_n, i_m, T, N, BM, BN, ACT)
    else:
        if p_residual is not None:
            b_residual = gl.load(p_residual + o_m[None, :] * stride_residual + o_n[:, None], mask=m, other=0.0)
            b_out = (b_out.to(gl.float32) + b_residual.to(gl.float32)).to(p_out.dtype.element_ty)
        gl.store(p_out + o, b_out, mask=m)
        if p_norm is not None:
            b_total = b_out.to(gl.float32)  # the norm is that of what is stored
            b_norm = gl.load(p_norm + o_n, mask=m_n, other=0.0).to(gl.float32)[:, None]
            gl.store(p_rows + o, (b_total * b_norm).to(p_rows.dtype.element_ty), mask=m)
            b_squares = gl.sum(gl.where(m_n[:, None], b_total * b_total, 0.0), 0)
            gl.store(p_new_squares + o_m * gl.num_programs(0) + i_n, b_squares, mask=o_m < T)
