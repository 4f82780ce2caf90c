# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a whole step with rows of 4 bits whose groups of 128 inputs share a scale, in Gluon.

A line of 128 bytes is two blocks of 128 codes, and each block is a group. As with plain weights a block of a row meets
several blocks of the vector, and its own counts: so a product of few columns sums up whole groups, and a group's scale
is one factor of its sum. Nibbles are multiplied as `gluon_packed` makes them, too large by a constant: what is too
much, and a zero point, is a multiple of the sum of the group's inputs, which is known since they are.

scale_smem: row 0 has those sums; then comes a row for each stage of the ring, with the scales that it wants, and in its
second half offsets, in types of their own: [DEEP, COLUMNS, GROUP]. The warp that copies weights brings them with them:
fetched later they would queue behind all that is on its way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from app.kernels.gemm.gluon_packed import unpack
from app.kernels.whole_step.gluon_ring import release

COLUMNS = gl.constexpr(8)  # blocks of the vector that a block of a row meets
RUN = gl.constexpr(32)  # words of a block, each of PARTS codes
PARTS = gl.constexpr(4)
MOVED = gl.constexpr(136.0)  # what `unpack` makes of a nibble, less what it is worth


@gluon.constexpr_function
def is_of_nibbles(form):
    """True of "nibble SCALES [OFFSETS]": the types of what stands beside a weight."""
    return form.startswith("nibble ")


@gluon.constexpr_function
def num_sides(form):
    """Returns how many tensors stand beside a weight."""
    return len(form.split()) - 1


@gluon.constexpr_function
def side_type(form, side):
    """The type of one of them."""
    return getattr(gl, form.split()[1 + side])


@gluon.constexpr_function
def side_bytes(form, side):
    """The bytes of its numbers."""
    return {"float16": 2, "bfloat16": 2, "float32": 4}[form.split()[1 + side]]


@gluon.constexpr_function
def arrivals(form):
    """Returns how often a stage is arrived at: by who told its copies, and by each thread that brought scales."""
    return 33 if form.startswith("nibble ") else 1


@gluon.jit
def keep_sums(scale_smem, c, b_x):
    """Notes what blocks of a vector, the rows of its chunk c, add up to."""
    ROWS: gl.constexpr = b_x.shape[0]
    sums = scale_smem.index(0)._reinterpret(
        gl.float32, [scale_smem.shape[1] // ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    sums.index(c).store(gl.sum(b_x.to(gl.float32), 1))


@gluon.jit
def side_of(scale_smem, stage, SIDE: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, FORM: gl.constexpr):
    """Room for what stands beside a weight, as a stage of its product wants it: [DEEP, COLUMNS, GROUP]."""
    BYTES: gl.constexpr = side_bytes(FORM, SIDE)
    SIZE: gl.constexpr = 2 * CL * GROUP * BYTES // 4
    row = scale_smem.index(1 + stage).slice(SIDE * (scale_smem.shape[1] // num_sides(FORM)), SIZE)
    return row._reinterpret(
        side_type(FORM, SIDE), [2 * CL // COLUMNS, COLUMNS, GROUP], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )


@gluon.jit
def sides_of(
    p_base, p_place, row, N: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Pointers to what stands beside rows of a weight, [groups of inputs, N] each, for a warp that brings it."""
    sides = gl.tuple(())
    for side in gl.static_range(num_sides(FORM)):
        sides = sides + gl.tuple((side_at(p_base, gl.load(p_place + side), row, N, GROUP, CL, FORM, side),))
    return sides


@gluon.jit
def side_at(
    p_base, at_side, row, N: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr, FORM: gl.constexpr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """One of `sides_of`."""
    V: gl.constexpr = 16 // side_bytes(FORM, SIDE)
    S3: gl.constexpr = gl.BlockedLayout([1, 1, V], [4 * V // GROUP, COLUMNS, GROUP // V], [1, 1, 1], [2, 1, 0])
    o_d = gl.arange(0, 2 * CL // COLUMNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, S3)))[:, None, None]
    o_b = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, S3)))[None, :, None]
    o_r = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, S3)))[None, None, :]
    p_side = (p_base + at_side * 8).to(gl.pointer_type(side_type(FORM, SIDE)), bitcast=True)
    return p_side + ((o_d * COLUMNS + o_b) * N + o_r + row)


@gluon.jit
def bring_sides(sides, scale_smem, ready, stage, at, GROUP: gl.constexpr, CL: gl.constexpr, FORM: gl.constexpr):
    """Has them brought for a stage, `at` numbers behind where they begin; all threads of the warp arrive then."""
    for side in gl.static_range(num_sides(FORM)):
        async_copy.async_copy_global_to_shared(side_of(scale_smem, stage, side, GROUP, CL, FORM), sides[side] + at)
    async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)


@gluon.jit
def nibble_group(
    x_smem, w_smem, scale_smem, ready, free, i, CHUNKS: gl.constexpr, GROUP: gl.constexpr, CL: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """Products of GROUP rows with x: [GROUP]."""
    DEEP: gl.constexpr = 2 * CL // COLUMNS
    M: gl.constexpr = GROUP * COLUMNS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    ROW: gl.constexpr = gl.SliceLayout(2, MMA)
    sums = scale_smem.index(0)._reinterpret(
        gl.float32, [scale_smem.shape[1] // (2 * CL), DEEP, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    b_acc = gl.zeros([DEEP, M, COLUMNS], gl.float32, MMA)
    for c in range(CHUNKS):
        stage = i % STAGES
        b_sums = sums.index(c).load(gl.SliceLayout(1, MMA))[:, None, :]
        b_part = gl.zeros([DEEP, M, COLUMNS], gl.float32, MMA) - MOVED * b_sums
        mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
        blocks = w_smem.index(stage).reshape([GROUP, DEEP, COLUMNS, RUN]).permute((1, 0, 2, 3))
        b_words = blocks.reshape([DEEP, M, RUN]).load(A).to(gl.int16, bitcast=True)
        scales = side_of(scale_smem, stage, 0, GROUP, CL, FORM).permute((0, 2, 1)).reshape([DEEP, M])
        b_scales = scales.load(ROW).to(gl.float32)[:, :, None]
        if num_sides(FORM) > 1:
            offsets = side_of(scale_smem, stage, 1, GROUP, CL, FORM).permute((0, 2, 1)).reshape([DEEP, M])
            b_acc += b_sums * offsets.load(ROW).to(gl.float32)[:, :, None]
        for j in gl.static_range(PARTS):
            b_x = x_smem.index(c * PARTS + j).reshape([DEEP, COLUMNS, RUN]).permute((0, 2, 1)).load(B)
            b_part = mma_v2(unpack(b_words, j, "nibble", gl.bfloat16), b_x, b_part)
        b_acc += b_part * b_scales
        release(free.index(stage))
        i += 1
    o_m = gl.arange(0, M, layout=gl.SliceLayout(1, gl.SliceLayout(0, MMA)))
    o_n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(0, MMA)))
    b_own = gl.where((o_m % COLUMNS)[:, None] == o_n[None, :], gl.sum(b_acc, 0), 0.0)
    return gl.sum(gl.reshape(gl.sum(b_own, 1), [GROUP, COLUMNS]), 1), i
