# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a whole step with rows of a weight, whatever its form, in Gluon.

A weight lies as words of 16 bits, each of which holds PARTS numbers (`gemm/stored.py`): in bf16 one; 128 numbers of a
row are a block of 128 / PARTS words, of which all the first numbers come first. A stage of the ring has CL lines of
GROUP rows. The vector that rows are multiplied with lies in shared memory part by part, as words meet it: a line of a
row is multiplied with all lines of a part on the tensor cores, and the products of a line with its own one count.

A form is a function here that multiplies a stage, and one that fetches the scales which that wants. Whoever reads a
stage by plain loads lets it go by `release`, or behind the use of all that was loaded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from app.kernels.gemm.gluon_packed import unpack
from app.kernels.whole_step.gluon_copies import WIDE, thread_barrier
from app.kernels.whole_step.gluon_nibbles import is_of_nibbles, keep_sums, nibble_group

BLOCK = gl.constexpr(128)  # numbers of a row whose words lie together


@gluon.jit
def store_chunk(x_smem, scale_smem, c, b_x, CL: gl.constexpr, PARTS: gl.constexpr, FORM: gl.constexpr):
    """Writes chunk c of a vector, which comes in its order, [CL * PARTS / 2, BLOCK]."""
    if is_of_nibbles(FORM):
        keep_sums(scale_smem, c, b_x)
    chunks = x_smem
    if PARTS > 1:
        chunks = x_smem._reinterpret(x_smem.dtype, [x_smem.shape[0] // PARTS, PARTS * CL, WIDE], x_smem.layout)
        b_split = gl.reshape(b_x, [CL, WIDE * PARTS // BLOCK, PARTS, BLOCK // PARTS])
        b_x = gl.permute(b_split, (2, 0, 1, 3))
    chunks.index(c).store(gl.reshape(b_x, [PARTS * CL, WIDE]))


@gluon.jit
def all_stored(FORM: gl.constexpr):
    """Behind this all warps see what was stored."""
    if FORM == "bf16":
        fence_async_shared()  # the tensor cores read it
    thread_barrier()


@gluon.jit
def scales_ahead(
    p_base, at, row, SECOND: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, N: gl.constexpr,
    KEPT_ROWS: gl.constexpr, KEPT: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, WARPS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Scales [KEPT_ROWS, KEPT] of GROUPS groups of rows of a weight [N, ..], rows as `copy_rows` takes them; `at`: how
    many times 16 bytes from p_base on they lie. A row of these is a group of rows, or the blocks of a stage."""
    if FORM == "bf16" or is_of_nibbles(FORM):
        b_scales = 0
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // KEPT, KEPT], [WARPS, 1], [1, 0])
        o_r = gl.arange(0, KEPT_ROWS, layout=gl.SliceLayout(1, LAYOUT))
        o_k = gl.arange(0, KEPT, layout=gl.SliceLayout(0, LAYOUT))
        o_g = o_r // CHUNKS if FORM == "e4m3 blocks" else o_r
        o_row = row + (o_g // 2 * GROUP + o_g % 2 * SECOND if SECOND > 0 else o_g * GROUP)
        if FORM == "e4m3 blocks":
            o = ((o_r % CHUNKS * CL)[:, None] + o_k[None, :]) * (N // BLOCK) + (o_row // BLOCK)[:, None]
        else:
            o = o_row[:, None] + o_k[None, :]
        p_scales = (p_base + at * 8).to(gl.pointer_type(gl.float32), bitcast=True)
        b_scales = gl.load(p_scales + o, mask=(o_g < GROUPS)[:, None] & (o_k < KEPT)[None, :], other=0.0)
    return b_scales


@gluon.jit
def keep_scales(b_scales, scale_smem, FORM: gl.constexpr):
    """Puts them where `group_of` finds them, behind the next barrier of threads; nibbles' come with their stages."""
    if FORM != "bf16" and not is_of_nibbles(FORM):
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scale_smem._reinterpret(gl.float32, scale_smem.shape, FLAT).store(b_scales)


@gluon.jit
def group_of(
    x_smem, w_smem, scale_smem, ready, free, i, g, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    OWN_LINES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Products of GROUP rows with x: [GROUP]; g: which group of the product it is; OWN_LINES: those of a stage's CL
    that are the row's."""
    if FORM == "bf16":
        b_sum, i = plain_group(x_smem, w_smem, ready, free, i, CHUNKS, GROUP, CL, OWN_LINES, STAGES, WARPS)
    elif is_of_nibbles(FORM):
        b_sum, i = nibble_group(x_smem, w_smem, scale_smem, ready, free, i, CHUNKS, GROUP, CL, STAGES, WARPS, FORM)
    else:
        b_sum, i = byte_group(
            x_smem, w_smem, scale_smem, ready, free, i, g, CHUNKS, GROUP, CL, OWN_LINES, STAGES, WARPS, FORM
        )  # fmt: skip
    return b_sum, i


@gluon.jit
def plain_group(
    x_smem, w_smem, ready, free, i, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    OWN_LINES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The same of rows in bf16."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CL, 16])
    b_acc = gl.zeros([GROUP * CL, CL], gl.float32, MMA)
    for c in range(CHUNKS):
        stage = i % STAGES
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_acc = warpgroup_mma(w_smem.index(stage), x_smem.index(c).permute((1, 0)), b_acc, is_async=True)
        b_acc = warpgroup_mma_wait(0, deps=[b_acc])
        mbarrier.arrive(free.index(stage), count=1)
        i += 1
    return own_sums(b_acc, GROUP, CL, OWN_LINES, MMA), i


@gluon.jit
def own_sums(b_sums, GROUP: gl.constexpr, CL: gl.constexpr, OWN_LINES: gl.constexpr, MMA: gl.constexpr):
    """Products [GROUP * CL, CL] of a stage's lines with lines of a vector: each row's, of its lines with their own.
    Rows of fewer lines than CL lie one behind the other, and behind them what was copied before."""
    o_m = gl.arange(0, GROUP * CL, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, CL, layout=gl.SliceLayout(0, MMA))
    b_lines = gl.sum(gl.where((o_m % OWN_LINES)[:, None] == o_n[None, :], b_sums, 0.0), 1)
    if OWN_LINES == CL:
        b_rows = gl.sum(gl.reshape(b_lines, [GROUP, CL]), 1)
    else:
        o_r = gl.arange(0, GROUP, layout=gl.SliceLayout(0, MMA))
        b_rows = gl.sum(gl.where((o_m // OWN_LINES)[:, None] == o_r[None, :], b_lines[:, None], 0.0), 0)
    return b_rows


@gluon.jit
def byte_group(
    x_smem, w_smem, scale_smem, ready, free, i, g, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    OWN_LINES: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The same of rows whose words hold two numbers of 8 bits each. A line is a block, which may have a scale."""
    KIND: gl.constexpr = "int8" if FORM == "int8" else "e4m3"
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    words = w_smem._reinterpret(gl.int16, [STAGES, GROUP * CL, WIDE], w_smem.layout)
    b_acc = gl.zeros([GROUP * CL, CL], gl.float32, MMA)
    for c in range(CHUNKS):
        stage = i % STAGES
        if FORM == "e4m3 blocks":  # rows of a stage are of one block of rows, so each column has a scale
            b_scale = scale_smem.index(g * CHUNKS + c).load(gl.SliceLayout(0, MMA))
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        b_words = words.index(stage).load(gl.DotOperandLayout(0, MMA, 2))
        b_part = gl.zeros([GROUP * CL, CL], gl.float32, MMA)
        for p in gl.static_range(2):
            b_x = x_smem.index(2 * c + p).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
            b_part = mma_v2(unpack(b_words, p, KIND, gl.bfloat16), b_x, b_part)
        if FORM == "e4m3 blocks":
            b_part *= b_scale[None, :]
        b_acc += b_part
        # All words were in use before, so they have come; `release` would wait for the next scales, too.
        mbarrier.arrive(free.index(stage), count=1)
        i += 1
    b_sum = own_sums(b_acc, GROUP, CL, OWN_LINES, MMA)
    if FORM != "e4m3 blocks":
        b_sum *= scale_smem.index(g).load(b_sum.type.layout)
    return b_sum, i
