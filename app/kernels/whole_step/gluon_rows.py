# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Products of a whole step of several rows, each with one token, with rows of a plain weight, in Gluon.

A stage of the ring has 16 lines of 8 rows of a weight, in two halves of 8 lines. A half, 64 lines, is one operand of
the tensor cores; the other one is those 8 lines of x of all rows: of the 8 products of a line with lines of a row, the
one with its own counts. So as many products are made for eight rows as one row takes by itself.
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

from app.kernels.whole_step.gluon_copies import WIDE, room, thread_barrier

GROUP = gl.constexpr(8)  # rows of a weight, in a stage
HALF = gl.constexpr(8)  # lines of each of them, in half a stage
PART = gl.constexpr(512)  # numbers in these
D = gl.constexpr(128)  # of a head


@gluon.jit
def copy_halves(
    d_halves, halves, ready, free, i, base, row, LINES: gl.constexpr, begin, end, GROUPS, SECOND, STAGES: gl.constexpr,
):  # fmt: skip
    """GROUPS groups of rows of a weight from `row` on, of each the chunks from begin to end; SECOND: of every other
    group another row (gate, up)."""
    for g in range(GROUPS):
        if SECOND > 0:
            first = row + (g // 2) * GROUP + (g % 2) * SECOND
        else:
            first = row + g * GROUP
        for c in range(begin, end):
            stage = room(ready, free, i, STAGES, STAGES)
            mbarrier.expect(ready.index(stage), 2 * GROUP * HALF * WIDE * 2)
            line = base + first * LINES + 2 * HALF * c
            for h in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    d_halves, [0, line + h * HALF, 0], ready.index(stage), halves.index(stage * 2 + h)
                )
            i += 1
    return i


@gluon.jit
def loaded_rows(p_x, STRIDE: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, XB: gl.constexpr):
    """Vectors of all rows, STRIDE numbers one behind the other: PARTS parts of [ROWS, PART]."""
    o = (
        gl.arange(0, ROWS, layout=gl.SliceLayout(1, XB))[:, None] * STRIDE
        + gl.arange(0, PART, layout=gl.SliceLayout(0, XB))[None, :]
    )
    found = gl.tuple(())
    for c in gl.static_range(PARTS):  # all are on their way before one is used; others than this program write some
        found = found + gl.tuple((gl.load(p_x + c * PART + o, cache_modifier=".cg"),))
    return found


@gluon.jit
def store_part(x_smem, c, b_x, ROWS: gl.constexpr):
    """Writes part c of the vectors, [ROWS, PART]: its lines, of each all rows."""
    b_lines = gl.permute(gl.reshape(b_x, [ROWS, HALF, WIDE]), (1, 0, 2))
    x_smem.index(c).store(gl.reshape(b_lines, [HALF * ROWS, WIDE]))


@gluon.jit
def all_parts_stored():
    """Behind this the tensor cores of all warps see what was stored."""
    fence_async_shared()
    thread_barrier()


@gluon.jit
def loaded_norm(p_norm, PARTS: gl.constexpr, XB: gl.constexpr):
    """A norm's weight, in parts."""
    o = gl.arange(0, PART, layout=gl.SliceLayout(0, XB))
    found = gl.tuple(())
    for c in gl.static_range(PARTS):
        found = found + gl.tuple((gl.load(p_norm + c * PART + o),))
    return found


@gluon.jit
def normed_rows(p_hidden, norms, x_smem, eps, H: gl.constexpr, ROWS: gl.constexpr, XB: gl.constexpr):
    """Writes hidden * norm into x_smem; what each row's products are multiplied by then."""
    b_squares = gl.zeros([ROWS, PART], gl.float32, XB)
    rows = loaded_rows(p_hidden, H, H // PART, ROWS, XB)
    for c in gl.static_range(H // PART):
        b_h = rows[c].to(gl.float32)
        store_part(x_smem, c, (b_h * norms[c].to(gl.float32)[None, :]).to(gl.bfloat16), ROWS)
        b_squares += b_h * b_h
    rms = gl.rsqrt(gl.sum(b_squares, 1) / H + eps)
    all_parts_stored()
    return rms


@gluon.jit
def taken_rows(p_x, x_smem, K: gl.constexpr, ROWS: gl.constexpr, XB: gl.constexpr):
    """Copies vectors of all rows into x_smem."""
    rows = loaded_rows(p_x, K, K // PART, ROWS, XB)
    for c in gl.static_range(K // PART):
        store_part(x_smem, c, rows[c], ROWS)
    all_parts_stored()


@gluon.jit
def no_products(ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Sums of GROUP rows of a weight, as the tensor cores keep them, of nothing yet."""
    COLUMNS: gl.constexpr = HALF * ROWS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, COLUMNS * 4 // WARPS, 16])
    return gl.zeros([GROUP * HALF, COLUMNS], gl.float32, MMA)


@gluon.jit
def add_stage(b_acc, x_smem, w_smem, ready, i, c, STAGES: gl.constexpr):
    """Adds products of a stage with chunk c of x, which are on their way: see `added`."""
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
    for h in gl.static_range(2):
        b_acc = warpgroup_mma(
            w_smem.index(stage * 2 + h), x_smem.index(c * 2 + h).permute((1, 0)), b_acc, is_async=True
        )  # fmt: skip
    return b_acc


@gluon.jit
def added(b_acc, free, i, STAGES: gl.constexpr):
    """Waits for the products of a stage, and lets it go: their sums."""
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    mbarrier.arrive(free.index(i % STAGES), count=1)
    return b_acc


@gluon.jit
def add_stages(b_acc, x_smem, w_smem, ready, free, i, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    """Adds products of all stages of a group but the last; which stage that is."""
    for c in range(CHUNKS - 1):
        b_acc = added(add_stage(b_acc, x_smem, w_smem, ready, i, c, STAGES), free, i, STAGES)
        i += 1
    return b_acc, i


@gluon.jit
def own_sums(b_acc, ROWS: gl.constexpr):
    """Sums of GROUP rows of a weight with all rows of x: [GROUP, ROWS]."""
    MMA: gl.constexpr = b_acc.type.layout
    o_m = gl.arange(0, GROUP * HALF, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, HALF * ROWS, layout=gl.SliceLayout(0, MMA))
    b_own = gl.where((o_m % HALF)[:, None] == (o_n // ROWS)[None, :], b_acc, 0.0)
    b_own = gl.reshape(b_own, [GROUP, HALF, HALF, ROWS])
    return gl.sum(gl.sum(b_own, 2), 1)


@gluon.jit
def products_of_rows(
    x_smem, w_smem, ready, free, out_smem, i, GROUPS, CHUNKS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, PAIRS: gl.constexpr = False,
):  # fmt: skip
    """Writes products of GROUPS groups of rows of a weight into out_smem; of PAIRS the second ones into its second
    half."""
    b_before = no_products(ROWS, WARPS)
    for g in range(GROUPS):
        b_acc, i = add_stages(no_products(ROWS, WARPS), x_smem, w_smem, ready, free, i, CHUNKS, STAGES)
        b_acc = add_stage(b_acc, x_smem, w_smem, ready, i, CHUNKS - 1, STAGES)
        put_sums(out_smem, gl.maximum(g - 1, 0), own_sums(b_before, ROWS), PAIRS)  # meanwhile
        b_before = added(b_acc, free, i, STAGES)
        i += 1
    put_sums(out_smem, GROUPS - 1, own_sums(b_before, ROWS), PAIRS)
    thread_barrier()
    return i


@gluon.jit
def put_sums(out_smem, g, b_sum, PAIRS: gl.constexpr):
    """Sums of group g."""
    if PAIRS:
        g = g % 2 * (out_smem.shape[0] // 2) + g // 2
    out_smem.index(g).store(b_sum)


@gluon.jit
def products_with(
    p_x, x_smem, w_smem, ready, free, out_smem, i, F: gl.constexpr, GROUPS: gl.constexpr, AT_ONCE: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, XB: gl.constexpr,
):  # fmt: skip
    """The same of vectors [ROWS, F] in memory, AT_ONCE numbers of which have room in x_smem. Those behind them are on
    their way while the ones before are multiplied."""
    accs = gl.tuple(())
    for _ in gl.static_range(GROUPS):
        accs = accs + gl.tuple((no_products(ROWS, WARPS),))
    rows = loaded_rows(p_x, F, AT_ONCE // PART, ROWS, XB)
    for k in range(F // AT_ONCE):
        for c in gl.static_range(AT_ONCE // PART):
            store_part(x_smem, c, rows[c], ROWS)
        all_parts_stored()
        if F > AT_ONCE:  # behind the last ones it reads these again
            rows = loaded_rows(p_x + gl.minimum((k + 1) * AT_ONCE, F - AT_ONCE), F, AT_ONCE // PART, ROWS, XB)
        sums = gl.tuple(())
        for g in gl.static_range(GROUPS):
            b_acc, i = add_stages(
                accs[g], x_smem, w_smem, ready, free, i, AT_ONCE // (2 * PART) + 1, STAGES
            )  # fmt: skip
            sums = sums + gl.tuple((b_acc,))
        accs = sums
        thread_barrier()  # all have multiplied
    for g in gl.static_range(GROUPS):
        out_smem.index(g).store(own_sums(accs[g], ROWS))
    thread_barrier()
    return i
