# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Latent attention (MLA) of one token within a whole step, in Gluon: the cache is read once for all heads.

Queries go through their head's function of keys (a program has some columns of one head's), so that they meet latents
as these lie in the cache; a program then has all heads and a part of the context, on the tensor cores, with keys as
rows and heads as columns; and what a head found goes through its function of values (a program has some rows).
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
from app.kernels.whole_step.gluon_pairs import release_all

KEYS = gl.constexpr(64)  # tokens of a tile: two panels of them, of 64 numbers each, are a stage of the ring
BOX = gl.constexpr(16)  # of which the copy engine brings so many at a time
PAIR = gl.constexpr(128)  # numbers of a token in a stage
NO_MAX = gl.constexpr(-1e30)


@gluon.jit
def tiles_of(pos, i_p, SPLITS: gl.constexpr):
    """A program's tiles of the context, the new token's among them: the first, the end, and how many programs have
    any."""
    tiles = pos // KEYS + 1
    each = gl.cdiv(tiles, SPLITS)
    begin = gl.minimum(i_p * each, tiles)
    return begin, gl.minimum(begin + each, tiles), gl.cdiv(tiles, each)


@gluon.jit
def copy_latents(
    d_tokens, pieces, ready, free, i, line, p_table, pos, i_p, token_lines, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    """Latents and rotated keys of this program's part of the context; `line` of memory is where the cache begins. Of
    boxes behind the new token's others come, which are numbers."""
    BOXES: gl.constexpr = KEYS // BOX
    if i_p < SPLITS:
        begin, end, _ = tiles_of(pos, i_p, SPLITS)
        for tile in range(begin, end):
            rows = gl.tuple(())
            for b in gl.static_range(BOXES):  # all block numbers are on their way before a copy is told
                first = tile * KEYS + b * BOX
                first = gl.where(first <= pos, first, gl.maximum(pos // BOX - 1, 0) * BOX)
                rows = rows + gl.tuple((gl.load(p_table + first // S) * S + first % S,))
            for first_line in range(0, token_lines, 2):
                stage = room(ready, free, i, STAGES, AHEAD)
                halves = gl.minimum(token_lines - first_line, 2)
                if halves == 2:
                    mbarrier.expect(ready.index(stage), 2 * KEYS * WIDE * 2)
                else:
                    mbarrier.expect(ready.index(stage), KEYS * WIDE * 2)
                for h in range(halves):
                    at = line + first_line + h
                    for b in gl.static_range(BOXES):
                        tma.async_copy_global_to_shared(
                            d_tokens,
                            [rows[b] + at // token_lines, at % token_lines * WIDE],
                            ready.index(stage),
                            pieces.index(stage * (2 * BOXES) + h * BOXES + b),
                        )
                i += 1
    return i


@gluon.jit
def key_columns(p_up, i_p, N: gl.constexpr, V: gl.constexpr, R: gl.constexpr, SPANS: gl.constexpr, WARPS: gl.constexpr):
    """This program's columns of its head's function of keys: [N, R / SPANS]."""
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    o_n = gl.arange(0, N, layout=gl.SliceLayout(1, COLUMNS))
    o_r = gl.arange(0, R // SPANS, layout=gl.SliceLayout(0, COLUMNS))
    p_own = p_up + i_p // SPANS * ((N + V) * R) + i_p % SPANS * (R // SPANS)
    return gl.load(p_own + o_n[:, None] * R + o_r[None, :])


@gluon.jit
def of_new(p_norm, p_cos, p_sin, R: gl.constexpr, DR: gl.constexpr, WARPS: gl.constexpr):
    """Fetches what the new token's latent and whatever rotates are multiplied by."""
    LATENT: gl.constexpr = gl.BlockedLayout([R // (32 * WARPS) if R > 32 * WARPS else 1], [32], [WARPS], [0])
    TURNED: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    o_d = gl.arange(0, DR, layout=TURNED)
    norm = gl.load(p_norm + gl.arange(0, R, layout=LATENT))
    return norm, gl.load(p_cos + o_d), gl.load(p_sin + o_d)


@gluon.jit
def turned(p_pairs, b_cos, b_sin, DR: gl.constexpr):
    """DR numbers, rotated, whose pairs lie together: the first of each come first."""
    HALF: gl.constexpr = DR // 2
    o_d = gl.arange(0, DR, layout=b_cos.type.layout)
    b_own = gl.load(p_pairs + gl.where(o_d < HALF, 2 * o_d, 2 * o_d - DR + 1), cache_modifier=".cg")
    b_other = gl.load(p_pairs + gl.where(o_d < HALF, 2 * o_d + 1, 2 * o_d - DR), cache_modifier=".cg")
    b_made = b_own.to(gl.float32) * b_cos.to(gl.float32) + b_other.to(gl.float32) * b_sin.to(gl.float32)
    return b_made.to(gl.bfloat16)


@gluon.jit
def absorb(
    columns, b_norm, b_cos, b_sin, p_in, p_query, p_new, p_cache, slot, i_p, eps, stride_block, QH: gl.constexpr,
    N: gl.constexpr, R: gl.constexpr, DR: gl.constexpr, SPANS: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Writes some numbers of a head's query for latents. The head's first program adds what rotates; and the second of
    all has the new token's latent and key."""
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    head, span = i_p // SPANS, i_p % SPANS
    p_own = p_in + head * (N + DR)
    b_q = gl.load(p_own + gl.arange(0, N, layout=gl.SliceLayout(1, COLUMNS)), cache_modifier=".cg")
    o_d = gl.arange(0, DR, layout=b_cos.type.layout)
    if i_p == 1:
        o_r = gl.arange(0, R, layout=b_norm.type.layout)
        p_latent = p_in + QH * (N + DR)
        b_c = gl.load(p_latent + o_r, cache_modifier=".cg").to(gl.float32)
        b_k = turned(p_latent + R, b_cos, b_sin, DR)
        b_c = (b_c * gl.rsqrt(gl.sum(b_c * b_c, 0) / R + eps) * b_norm.to(gl.float32)).to(gl.bfloat16)
        gl.store(p_new + o_r, b_c)
        gl.store(p_new + R + o_d, b_k)
        if slot >= 0:
            p_own_slot = p_cache + (slot // S) * stride_block + (slot % S) * (R + DR)
            gl.store(p_own_slot + o_r, b_c)
            gl.store(p_own_slot + R + o_d, b_k)
    if span == 0:
        gl.store(p_query + head * (R + DR) + R + o_d, turned(p_own + N, b_cos, b_sin, DR))
    o_c = gl.arange(0, R // SPANS, layout=gl.SliceLayout(0, COLUMNS))
    b_made = gl.sum(b_q.to(gl.float32)[:, None] * columns.to(gl.float32), 0)
    gl.store(p_query + head * (R + DR) + span * (R // SPANS) + o_c, b_made.to(gl.bfloat16))


@gluon.jit
def put_new(pieces, i, tile, new, pos, R: gl.constexpr, DR: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Puts the new token into its tile, and zeros behind it: a slot there may hold NaN of a former owner, which a
    weight of 0 does not hide."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BOXES: gl.constexpr = KEYS // BOX
    o_n = gl.arange(0, BOX, layout=gl.SliceLayout(1, ROW))[:, None]
    first = (pos % KEYS) // BOX
    # A context's first box has none before it to come in the place of the tile's others: these are it again.
    for b in range(first, gl.where(pos < BOX, BOXES, first + 1)):
        o_at = tile * KEYS + b * BOX + o_n
        for p in gl.static_range((R + DR) // WIDE):
            box = pieces.index((i + p // 2) % STAGES * (2 * BOXES) + p % 2 * BOXES + b)
            b_old = gl.where(o_at < pos, box.load(ROW).to(gl.float32), 0.0)
            box.store(gl.where(o_at == pos, new[p].to(gl.float32)[None, :], b_old).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def attend_latents(
    w_smem, x_smem, ready, free, p_query, p_new, p_parts, p_sums, i, i_p, pos, factor, QH: gl.constexpr,
    R: gl.constexpr, DR: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """All heads over this program's part of the context: what they found [heads, R], their largest scores and sums."""
    KEY: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, QH, 16])
    HEAD: gl.constexpr = gl.SliceLayout(0, KEY)
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    TILES: gl.constexpr = R // PAIR
    BOXES: gl.constexpr = KEYS // BOX
    q_smem = x_smem._reinterpret(gl.bfloat16, [(R + DR) // WIDE + 1, QH, WIDE], x_smem.layout)
    wide = x_smem._reinterpret(gl.bfloat16, [TILES, QH, PAIR], x_smem.layout)
    p_smem = q_smem.index((R + DR) // WIDE)
    tiles = w_smem._reinterpret(gl.bfloat16, [STAGES, KEYS, PAIR], w_smem.layout)
    panels = w_smem._reinterpret(gl.bfloat16, [2 * STAGES, KEYS, WIDE], w_smem.layout)
    pieces = w_smem._reinterpret(gl.bfloat16, [2 * STAGES * BOXES, BOX, WIDE], w_smem.layout)
    begin, end, _ = tiles_of(pos, i_p, SPLITS)
    if begin < end:
        o_h = gl.arange(0, QH, layout=gl.SliceLayout(1, ROW))[:, None]
        o_k = gl.arange(0, WIDE, layout=gl.SliceLayout(0, ROW))
        asked = gl.tuple(())
        new = gl.tuple(())
        for c in gl.static_range((R + DR) // WIDE):  # all are on their way before one is used
            p_q = p_query + o_h * (R + DR) + c * WIDE + o_k[None, :]
            asked = asked + gl.tuple((gl.load(p_q, cache_modifier=".cg"),))
            new = new + gl.tuple((gl.load(p_new + c * WIDE + o_k, cache_modifier=".cg"),))
        for c in gl.static_range((R + DR) // WIDE):
            q_smem.index(c).store(asked[c])
        fence_async_shared()
        thread_barrier()
        b_top = gl.full([QH], NO_MAX, gl.float32, HEAD)
        b_sum = gl.zeros([QH], gl.float32, HEAD)
        found = gl.tuple(())
        for _c in gl.static_range(TILES):
            found = found + gl.tuple((gl.zeros([PAIR, QH], gl.float32, KEY),))
        for tile in range(begin, end):
            for c in gl.static_range(TILES + 1):
                mbarrier.wait(ready.index((i + c) % STAGES), ((i + c) // STAGES) & 1)
            if tile == pos // KEYS:
                put_new(pieces, i, tile, new, pos, R, DR, STAGES, WARPS)
            b_s = gl.zeros([KEYS, QH], gl.float32, KEY)
            for c in gl.static_range(TILES):
                b_s = warpgroup_mma(tiles.index((i + c) % STAGES), wide.index(c).permute((1, 0)), b_s, is_async=True)
            b_s = warpgroup_mma(
                panels.index((i + TILES) % STAGES * 2), q_smem.index(2 * TILES).permute((1, 0)), b_s, is_async=True
            )
            b_s = warpgroup_mma_wait(0, deps=[b_s])
            o_n = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, KEY))
            b_s = gl.where((o_n <= pos)[:, None], b_s * factor, NO_MAX)
            b_high = gl.maximum(b_top, gl.max(b_s, 0))
            b_kept = gl.exp2(b_top - b_high)
            b_p = gl.where((o_n <= pos)[:, None], gl.exp2(b_s - b_high[None, :]), 0.0)
            b_sum = b_sum * b_kept + gl.sum(b_p, 0)
            b_top = b_high
            p_smem.store(gl.permute(b_p.to(gl.bfloat16), (1, 0)))
            fence_async_shared()
            thread_barrier()
            made = gl.tuple(())
            for c in gl.static_range(TILES):
                values = tiles.index((i + c) % STAGES).permute((1, 0))
                b_o = warpgroup_mma(values, p_smem.permute((1, 0)), found[c] * b_kept[None, :], is_async=True)
                made = made + gl.tuple((b_o,))
            found = warpgroup_mma_wait(0, deps=made)
            release_all(free, i, TILES + 1, STAGES)
            i += TILES + 1
        o_m = gl.arange(0, PAIR, layout=gl.SliceLayout(1, OUT))[:, None]
        o_q = gl.arange(0, QH, layout=gl.SliceLayout(0, OUT))[None, :]
        for c in gl.static_range(TILES):
            b_o = gl.convert_layout((found[c] / b_sum[None, :]).to(gl.bfloat16), OUT)
            gl.store(p_parts + (i_p * QH + o_q) * R + c * PAIR + o_m, b_o)
        o_q = gl.arange(0, QH, layout=HEAD)
        gl.store(p_sums + i_p * QH + o_q, b_top)
        gl.store(p_sums + (SPLITS + i_p) * QH + o_q, b_sum)
    return i


@gluon.jit
def values_of(
    w_smem, x_smem, ready, free, p_parts, p_sums, p_heads, i, i_p, pos, QH: gl.constexpr, V: gl.constexpr,
    R: gl.constexpr, SPANS: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, CL: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Writes some of the numbers that a head gives: rows of its function of values, with what all splits found."""
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, WARPS], [1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CL, 16])
    LINES: gl.constexpr = R // WIDE
    ROWS: gl.constexpr = V // SPANS
    head = i_p // SPANS
    _, _, used = tiles_of(pos, 0, SPLITS)
    o_s = gl.arange(0, SPLITS, layout=gl.SliceLayout(1, PARTS))
    o_r = gl.arange(0, R, layout=gl.SliceLayout(0, PARTS))
    m_s = o_s < used
    b_top = gl.load(p_sums + o_s * QH + head, mask=m_s, other=NO_MAX, cache_modifier=".cg")
    b_share = gl.load(p_sums + (SPLITS + o_s) * QH + head, mask=m_s, other=0.0, cache_modifier=".cg")
    p_own = p_parts + (o_s * (QH * R))[:, None] + head * R + o_r[None, :]
    b_parts = gl.load(p_own, mask=m_s[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    b_share *= gl.exp2(b_top - gl.max(b_top, 0))
    b_share = b_share / gl.sum(b_share, 0)
    b_found = gl.sum(b_parts * b_share[:, None], 0).to(gl.bfloat16)
    lines = x_smem._reinterpret(gl.bfloat16, [1, LINES, WIDE], x_smem.layout)
    lines.index(0).store(gl.reshape(b_found, [LINES, WIDE]))
    fence_async_shared()
    thread_barrier()
    stage = i % STAGES
    mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
    b_acc = gl.zeros([ROWS * LINES, CL], gl.float32, MMA)
    b_acc = warpgroup_mma(w_smem.index(stage), x_smem.index(0).permute((1, 0)), b_acc, is_async=True)
    b_acc = warpgroup_mma_wait(0, deps=[b_acc])
    release_all(free, i, 1, STAGES)
    o_m = gl.arange(0, ROWS * LINES, layout=gl.SliceLayout(1, MMA))
    o_n = gl.arange(0, CL, layout=gl.SliceLayout(0, MMA))
    b_own = gl.where((o_m % LINES)[:, None] == o_n[None, :], b_acc, 0.0)
    b_made = gl.sum(gl.reshape(gl.sum(b_own, 1), [ROWS, LINES]), 1)
    o_v = gl.arange(0, ROWS, layout=b_made.type.layout)
    gl.store(p_heads + i_p * ROWS + o_v, b_made.to(gl.bfloat16))
    return i + 1
