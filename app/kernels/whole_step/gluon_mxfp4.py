# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a whole step with rows in MXFP4, of the experts that were chosen, in Gluon.

Numbers are floats of 4 bits (e2m1), and 32 of them share a scale, a power of two. Rows may end in the midst of a line,
so they are copied 16 bytes at a time (cp.async), not by the copy engine. A stage has four pieces, each of 8 rows and of
8 blocks of 128 inputs, with a word of four exponents for each row and block: of gate two groups of rows and of up the
same, or of down rows of four experts. As with nibbles a block of a row meets eight blocks of the vector, and its own
counts, so a piece is one tile of the tensor cores for each warp.

Numbers are multiplied as small as their bits are in bf16: the vector is multiplied by 2^UP, and the sums by 2^REST.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from app.kernels.moe.gluon_few import unpack
from app.kernels.whole_step.gluon_copies import room, thread_barrier
from app.kernels.whole_step.gluon_experts import choose, one_of
from app.kernels.whole_step.gluon_ring import release

BLOCK = gl.constexpr(128)  # inputs with four scales
RUN = gl.constexpr(32)  # words of a block, each of four numbers; inputs with a scale
PIECES = gl.constexpr(4)  # of a stage
ROWS = gl.constexpr(8)  # of a piece
BLOCKS = gl.constexpr(8)  # of a row, in a piece
CHUNK = gl.constexpr(1024)  # inputs of a piece
UP = gl.constexpr(2.0**64)
REST = gl.constexpr(2.0**62)
ARRIVALS = gl.constexpr(33)  # at a stage: who told its copies, and each thread of the warp that brought some


@gluon.jit
def bring_piece(
    p_words, p_scales, words, scales, place, expert, row, c, N: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Has chunk c of ROWS rows of an expert's weight [N, K], from `row` on, brought to a place."""
    NUM: gl.constexpr = (K + BLOCK - 1) // BLOCK  # blocks of a row
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    SIDES: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [1, 1], [1, 0])
    o_l = gl.arange(0, ROWS * 4, layout=gl.SliceLayout(1, LINES))[:, None]  # four lines of a row's chunk
    o_w = gl.arange(0, 2 * RUN, layout=gl.SliceLayout(0, LINES))[None, :]
    o_in = c * (BLOCKS * RUN) + o_l % 4 * (2 * RUN) + o_w
    p_w = p_words + (expert * N + row) * (NUM * RUN) + (o_l // 4 * (NUM * RUN) + o_in)
    async_copy.async_copy_global_to_shared(words.index(place), p_w, mask=o_in < NUM * RUN)
    o_b = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, SIDES))[:, None]
    o_r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SIDES))[None, :]
    # Behind the last block comes no number but 0: its own scales are as good as others.
    p_s = p_scales + ((expert * NUM + gl.minimum(c * BLOCKS + o_b, NUM - 1)) * N + row + o_r)
    async_copy.async_copy_global_to_shared(scales.index(place), p_s)


@gluon.jit
def copy_chosen(
    w_smem, scale_smem, ready, free, i, chosen, p_base, p_own, p_scores, p_choice, first_act, acts, first_own, owned,
    H: gl.constexpr, F: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, E: gl.constexpr, BE: gl.constexpr,
    TOP: gl.constexpr, OF_CHOSEN: gl.constexpr, ROUNDS_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Rows of the chosen experts, as soon as they are known: groups of gate and of up from first_act on, of all experts
    one behind the other, then groups of down, of each expert those from first_own on."""
    words = w_smem._reinterpret(gl.int16, [STAGES * PIECES, ROWS * 4, 2 * RUN], w_smem.layout)
    scales = scale_smem._reinterpret(
        gl.int32, [STAGES * PIECES, BLOCKS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    WORDS: gl.constexpr = gl.pointer_type(gl.int16)
    SCALES: gl.constexpr = gl.pointer_type(gl.int32)
    p_gate, p_gate_scales = words_at(p_base, p_own, WORDS), words_at(p_base, p_own + 1, SCALES)
    p_down, p_down_scales = words_at(p_base, p_own + 3, WORDS), words_at(p_base, p_own + 4, SCALES)
    ids = choose(p_scores, p_choice, E, BE, TOP, OF_CHOSEN, ROUNDS_WEIGHTS)
    thread_barrier()
    mbarrier.arrive(chosen, count=1)
    for g in range(0, acts, 2):
        for c in range((H + CHUNK - 1) // CHUNK):
            stage = room(ready, free, i, STAGES, AHEAD)
            for p in gl.static_range(PIECES):  # of an odd number the last comes twice
                group = first_act + gl.minimum(g + p // 2, acts - 1)
                expert = one_of(ids, group // (F // ROWS), TOP)
                bring_piece(
                    p_gate, p_gate_scales, words, scales, stage * PIECES + p, expert,
                    group % (F // ROWS) * ROWS + p % 2 * F, c, 2 * F, H,
                )  # fmt: skip
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            mbarrier.arrive(ready.index(stage), count=1)
            i += 1
    for g in range(owned):
        for c in range((F + CHUNK - 1) // CHUNK):
            stage = room(ready, free, i, STAGES, AHEAD)
            for p in gl.static_range(PIECES):
                bring_piece(
                    p_down, p_down_scales, words, scales, stage * PIECES + p, ids[p], (first_own + g) * ROWS, c, H, F
                )
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            mbarrier.arrive(ready.index(stage), count=1)
            i += 1
    return i


@gluon.jit
def words_at(p_base, p_place, POINTER: gl.constexpr):
    """A pointer to what lies so many times 16 bytes from p_base on as p_place says."""
    return (p_base + gl.load(p_place) * 8).to(POINTER, bitcast=True)


@gluon.jit
def exponent(b_words, PART: gl.constexpr):
    """The scale of a part of a block, of four: fp32 whose exponent lies in that byte."""
    b_bits = b_words << (23 - 8 * PART) if PART < 3 else b_words >> 1
    return (b_bits & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def parts_of_chunk(x_pieces, at, MMA: gl.constexpr):
    """A chunk of the vector, as the four parts of a word's numbers meet it."""
    parts = gl.tuple(())
    for j in gl.static_range(4):
        parts = parts + gl.tuple((x_pieces.index(at + j).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 8)),))
    return parts


@gluon.jit
def add_piece(b_acc, words, scales, place, parts, MMA: gl.constexpr):
    """b_acc [ROWS * BLOCKS, BLOCKS] + products of a piece's blocks with blocks of a vector."""
    M: gl.constexpr = ROWS * BLOCKS
    b_words = words.index(place).reshape([M, RUN]).load(gl.DotOperandLayout(0, MMA, 8)).to(gl.int16, bitcast=True)
    b_scales = scales.index(place).permute((1, 0)).reshape([M]).load(gl.SliceLayout(1, MMA))
    for j in gl.static_range(4):
        b_part = mma_v2(unpack(b_words, j, "e2m1", gl.bfloat16), parts[j], gl.zeros([M, BLOCKS], gl.float32, MMA))
        b_acc = b_acc + b_part * exponent(b_scales, j)[:, None]
    return b_acc


@gluon.jit
def sums_of_rows(b_acc, MMA: gl.constexpr):
    """[ROWS]: what each row's own products add up to."""
    o_m = gl.arange(0, ROWS * BLOCKS, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, MMA))
    b_own = gl.where((o_m % BLOCKS)[:, None] == o_n[None, :], b_acc, 0.0)
    return gl.sum(gl.reshape(gl.sum(b_own, 1), [ROWS, BLOCKS]), 1) * REST


@gluon.jit
def gate_and_up(
    x_smem, w_smem, scale_smem, out_smem, ready, free, i, acts, K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Writes products of groups of gate's rows into out_smem, those of up's into its second half."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    HALF: gl.constexpr = out_smem.shape[0] // 2
    words, scales, x_pieces = seen(w_smem, scale_smem, x_smem, STAGES)
    for g in range(0, acts, 2):
        b_0 = gl.zeros([ROWS * BLOCKS, BLOCKS], gl.float32, MMA)
        b_1 = b_0
        b_2 = b_0
        b_3 = b_0
        for c in range((K + CHUNK - 1) // CHUNK):
            stage = i % STAGES
            parts = parts_of_chunk(x_pieces, c * 4, MMA)
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            b_0 = add_piece(b_0, words, scales, stage * PIECES, parts, MMA)
            b_1 = add_piece(b_1, words, scales, stage * PIECES + 1, parts, MMA)
            b_2 = add_piece(b_2, words, scales, stage * PIECES + 2, parts, MMA)
            b_3 = add_piece(b_3, words, scales, stage * PIECES + 3, parts, MMA)
            release(free.index(stage))
            i += 1
        out_smem.index(g).store(sums_of_rows(b_0, MMA))
        out_smem.index(HALF + g).store(sums_of_rows(b_1, MMA))
        out_smem.index(g + 1).store(sums_of_rows(b_2, MMA))
        out_smem.index(HALF + g + 1).store(sums_of_rows(b_3, MMA))
    thread_barrier()
    return i


@gluon.jit
def down(
    x_smem, w_smem, scale_smem, out_smem, ready, free, i, owned, K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Writes products of groups of down's rows into out_smem, added up over the experts."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    OF_EXPERT: gl.constexpr = (K + CHUNK - 1) // CHUNK * 4
    words, scales, x_pieces = seen(w_smem, scale_smem, x_smem, STAGES)
    for g in range(owned):
        b_0 = gl.zeros([ROWS * BLOCKS, BLOCKS], gl.float32, MMA)
        b_1 = b_0
        b_2 = b_0
        b_3 = b_0
        for c in range((K + CHUNK - 1) // CHUNK):
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            place = stage * PIECES
            at = c * 4
            b_0 = add_piece(b_0, words, scales, place, parts_of_chunk(x_pieces, at, MMA), MMA)
            b_1 = add_piece(b_1, words, scales, place + 1, parts_of_chunk(x_pieces, at + OF_EXPERT, MMA), MMA)
            b_2 = add_piece(b_2, words, scales, place + 2, parts_of_chunk(x_pieces, at + 2 * OF_EXPERT, MMA), MMA)
            b_3 = add_piece(b_3, words, scales, place + 3, parts_of_chunk(x_pieces, at + 3 * OF_EXPERT, MMA), MMA)
            release(free.index(stage))
            i += 1
        out_smem.index(g).store(sums_of_rows((b_0 + b_1) + (b_2 + b_3), MMA))
    thread_barrier()
    return i


@gluon.jit
def seen(w_smem, scale_smem, x_smem, STAGES: gl.constexpr):
    """Pieces of stages, their scales, and the vector's chunks part by part."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = w_smem._reinterpret(gl.bfloat16, [STAGES * PIECES, ROWS * 4, 2 * RUN], w_smem.layout)
    scales = scale_smem._reinterpret(gl.int32, [STAGES * PIECES, BLOCKS, ROWS], FLAT)
    x_pieces = x_smem._reinterpret(gl.bfloat16, [x_smem.shape[0] * PIECES, BLOCKS, RUN], FLAT)
    return words, scales, x_pieces


@gluon.jit
def store_blocks(x_smem, c, b_x):
    """Writes chunk c of a vector [BLOCKS, BLOCK], large enough for such small numbers."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    chunks = x_smem._reinterpret(gl.bfloat16, [x_smem.shape[0], 4 * BLOCKS, RUN], FLAT)
    b_x = gl.permute(gl.reshape((b_x.to(gl.float32) * UP).to(gl.bfloat16), [BLOCKS, 4, RUN]), (1, 0, 2))
    chunks.index(c).store(gl.reshape(b_x, [4 * BLOCKS, RUN]))
