# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Logits to tokens without a sort: temperature, min_p, top_k, top_p, Gumbel-argmax and the token's logprob.

Every filter keeps the tokens at or above a threshold of its row, so a threshold is all that is looked for. Rows
without a filter and greedy rows are decided while the logits are read the first time: noise that is about right says
who may be the best of a tile, and only these tokens are perturbed exactly. For the others a second reading
counts the tokens (and their mass) that lie within a few distances of the maximum; a third copies the tokens of the
least distance that is sure to hold the answer; then the thresholds are bisected over these few, on the bits of the
numbers, which is exact, ties included. Where too many tokens qualify (a flat distribution) the bisection reads the
whole row. All sums run in an order that only the row decides (I6).

Four launches whose grids follow from the shapes of the tensors alone; nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from app.kernels.launch import cdiv, next_power_of_2
from app.kernels.quick_launch import quick_launch
from app.kernels.sampling.triton_ops import perturb

_TILE = 2048  # tokens a program reads at a time
_CAPACITY = 8192  # tokens copied for the bisection; a row with more to look at is read whole
_NUM_CUTS = tl.constexpr(4)
# Read one number a row, so that nothing is won where they start at a multiple of 16 bytes; some are views that do not,
# and a kernel would be compiled once more in the midst of traffic.
_ROWS = ["p_temperature", "p_top_k", "p_top_p", "p_min_p", "p_keys", "p_positions"]
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# How far `noise_about` may be off, with room to spare (a test measures it), and a logit's quotient, by its own size.
ROUGHLY = tl.constexpr(1e-3)
_FEW_BITS = tl.constexpr(2e-6)
# The interpreter, and AMD's GPUs, take a logarithm of their own.
BY_ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)


@triton.jit
def cut_distance(i_cut):
    """Distances below a row's maximum, in units of the scaled logits: 3, 6, 10 or 16."""
    return tl.where(i_cut == 0, 3.0, tl.where(i_cut == 1, 6.0, tl.where(i_cut == 2, 10.0, 16.0)))


@triton.jit
def to_key(b_x):
    """An int32 that is ordered as the fp32 is. Its own inverse, but for the bit casts."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return tl.where(b_bits >= 0, b_bits, b_bits ^ 0x7FFFFFFF)


@triton.jit
def from_key(b_key):
    """The fp32 of a key."""
    return tl.where(b_key >= 0, b_key, b_key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def token_perturb(b_x, o_token, b_seed, b_choice, b_position, PURPOSE: tl.constexpr):
    """The perturbed logits of any tokens, wherever in the vocabulary they are."""
    o_zero = o_token * 0
    w0, w1, w2, w3 = tl.philox(b_seed, o_token // 4, o_zero + b_position, o_zero + b_choice, o_zero + PURPOSE)
    i_word = o_token % 4
    return perturb(b_x, tl.where(i_word == 0, w0, tl.where(i_word == 1, w1, tl.where(i_word == 2, w2, w3))))


@triton.jit
def tile_words(i_first, b_seed, b_choice, b_position, PURPOSE: tl.constexpr, BN: tl.constexpr):
    """The words of BN consecutive tokens from i_first, a multiple of 4: one Philox call for four of them."""
    o_group = i_first // 4 + tl.arange(0, BN // 4)
    o_zero = o_group * 0
    w0, w1, w2, w3 = tl.philox(b_seed, o_group, o_zero + b_position, o_zero + b_choice, o_zero + PURPOSE)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BN])


@triton.jit
def log2_about(b_x):
    """log2 of normal numbers, to some 22 bits."""
    if BY_ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.log2(b_x)


@triton.jit
def noise_about(b_word):
    """Returns what `perturb` adds for a Philox word, to ROUGHLY: a fifth of its work."""
    b_u = tl.minimum(b_word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.9999999403953552)
    b_few = b_u + b_u * b_u * 0.5  # -log1p(-u); of large u by its logarithm
    b_v = tl.where(b_u < 0.0078125, b_few, log2_about(1.0 - b_u) * -LN_2)
    return log2_about(b_v) * -LN_2


@triton.jit
def best_perturbed(
    b_x, p_row, i_first, o_token, m, b_temperature, b_seed, b_choice, b_position, V, PURPOSE: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """(the largest of the tile's perturbed logits, the lowest token that has it). Those that come near the largest are
    found by less exact numbers; they are computed, one after the other: there is hardly ever a second one."""
    b_noise = noise_about(tile_words(i_first, b_seed, b_choice, b_position, PURPOSE, BN))
    b_about = b_x * tl.minimum(1.0 / b_temperature, 1e30) + b_noise  # finite for any temperature
    b_most = tl.max(b_about, 0)
    b_least = b_most - (2.0 * ROUGHLY + tl.abs(b_most) * _FEW_BITS)
    b_least = tl.where(b_most == float("inf"), b_most, b_least)  # and not infinity less infinity
    m_near = m & (b_about >= b_least) & (b_about > float("-inf"))
    b_best = tl.full((), float("-inf"), tl.float32)
    b_token = i_first + 0
    o_near = tl.min(tl.where(m_near, o_token, V), 0)
    while o_near < V:
        b_own = tl.div_rn(tl.load(p_row + o_near).to(tl.float32), b_temperature)
        b_own = token_perturb(b_own, o_near, b_seed, b_choice, b_position, PURPOSE)
        b_token = tl.where(b_own > b_best, o_near, b_token)
        b_best = tl.maximum(b_best, b_own)
        o_near = tl.min(tl.where(m_near & (o_token > o_near), o_token, V), 0)
    return b_best, b_token


@triton.jit
def is_filtered(b_temperature, b_top_k, b_top_p, b_min_p, V):
    """Tells whether a row needs a threshold. A temperature of 0 (or below) is greedy."""
    return (b_temperature > 0.0) & (((b_top_k > 0) & (b_top_k < V)) | (b_top_p < 1.0) | (b_min_p > 0.0))


@quick_launch
@triton.jit(do_not_specialize_on_alignment=_ROWS)
def read_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p, p_keys, p_positions, p_max, p_sum, p_best, p_token,
    stride_logits, V, PURPOSE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Grid (N, tiles): a tile's maximum and sum of exponentials, and its best token (of rows without a filter)."""
    i_n, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_token = i_tile * BN + tl.arange(0, BN)
    m = o_token < V
    b_x = tl.load(p_logits + i_n * stride_logits + o_token, mask=m, other=float("-inf")).to(tl.float32)
    b_temperature = tl.load(p_temperature + i_n)
    o_out = i_n * tl.num_programs(1) + i_tile
    b_max = tl.max(b_x, 0)
    b_shift = tl.where(b_max == float("-inf"), 0.0, b_max)
    tl.store(p_max + o_out, b_max)
    tl.store(p_sum + o_out, tl.sum(tl.exp2((b_x - b_shift) * LOG2_E), 0))
    if is_filtered(b_temperature, tl.load(p_top_k + i_n), tl.load(p_top_p + i_n), tl.load(p_min_p + i_n), V):
        return
    if b_temperature > 0.0:
        b_seed = tl.load(p_keys + i_n * 2)
        b_choice = tl.load(p_keys + i_n * 2 + 1).to(tl.int32)
        b_position = tl.load(p_positions + i_n).to(tl.int32)
        b_best, b_token = best_perturbed(
            b_x, p_logits + i_n * stride_logits, i_tile * BN, o_token, m, b_temperature, b_seed, b_choice, b_position,
            V, PURPOSE, BN,
        )  # fmt: skip
    else:
        b_best = b_max
        b_token = tl.min(tl.where(m & (b_x == b_max), o_token, V), 0)
    tl.store(p_best + o_out, b_best)
    tl.store(p_token + o_out, b_token)


@triton.jit
def row_max(p_max, i_n, num_tiles, BT: tl.constexpr):
    """Maximum of a row's logits, not yet divided by the temperature."""
    o_t = tl.arange(0, BT)
    return tl.max(tl.load(p_max + i_n * num_tiles + o_t, mask=o_t < num_tiles, other=float("-inf")), 0)


@quick_launch
@triton.jit(do_not_specialize_on_alignment=_ROWS)
def count_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p, p_max, p_count, p_mass,
    stride_logits, V, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (N, tiles): of rows with a filter, how many tokens of the tile lie within each distance of the row's
    maximum, and their mass relative to the most likely token; in the last place the mass of all."""
    i_n, i_tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b_temperature = tl.load(p_temperature + i_n)
    if not is_filtered(b_temperature, tl.load(p_top_k + i_n), tl.load(p_top_p + i_n), tl.load(p_min_p + i_n), V):
        return
    o_token = i_tile * BN + tl.arange(0, BN)
    b_x = tl.load(p_logits + i_n * stride_logits + o_token, mask=o_token < V, other=float("-inf")).to(tl.float32)
    b_x = tl.div_rn(b_x, b_temperature)
    b_max = tl.div_rn(row_max(p_max, i_n, num_tiles, BT), b_temperature)
    b_mass = tl.exp2((b_x - b_max) * LOG2_E)
    o_out = (i_n * num_tiles + i_tile) * (_NUM_CUTS + 1)
    for i_cut in tl.static_range(_NUM_CUTS):
        m_cut = b_x >= b_max - cut_distance(i_cut)
        tl.store(p_count + o_out + i_cut, tl.sum(m_cut.to(tl.int32), 0))
        tl.store(p_mass + o_out + i_cut, tl.sum(tl.where(m_cut, b_mass, 0.0), 0))
    tl.store(p_count + o_out + _NUM_CUTS, 0)
    tl.store(p_mass + o_out + _NUM_CUTS, tl.sum(b_mass, 0))


@triton.jit
def choose_cut(p_count, p_mass, i_n, num_tiles, b_top_k, b_top_p, b_min_p, V, CAPACITY: tl.constexpr, BT: tl.constexpr):
    """(index of the least distance sure to hold every token that is kept, tokens within it, mass of the whole row).

    The index is _NUM_CUTS where no distance is sure, or holds more tokens than fit: then the whole row is searched.
    """
    o_t = tl.arange(0, BT)
    o_in = (i_n * num_tiles + o_t) * (_NUM_CUTS + 1)
    m_t = o_t < num_tiles
    b_total = tl.sum(tl.load(p_mass + o_in + _NUM_CUTS, mask=m_t, other=0.0), 0)
    b_cut = _NUM_CUTS + 0
    b_num = V + 0
    for i_back in tl.static_range(_NUM_CUTS):
        i_cut = _NUM_CUTS - 1 - i_back
        b_count = tl.sum(tl.load(p_count + o_in + i_cut, mask=m_t, other=0), 0)
        b_mass = tl.sum(tl.load(p_mass + o_in + i_cut, mask=m_t, other=0.0), 0)
        is_sure = b_mass >= b_top_p * b_total
        if b_min_p > 0.0:
            is_sure = cut_distance(i_cut) >= -tl.log(b_min_p) + 1e-3
        if (b_top_k > 0) & (b_top_k < V):
            is_sure = b_count >= b_top_k
        is_sure = is_sure & (b_count <= CAPACITY)
        b_cut = tl.where(is_sure, i_cut, b_cut)
        b_num = tl.where(is_sure, b_count, b_num)
    return b_cut, b_num, b_total


@quick_launch
@triton.jit(do_not_specialize_on_alignment=_ROWS)
def gather_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p, p_max, p_count, p_mass, p_found_x, p_found_token,
    stride_logits, V, CAPACITY: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (N, tiles): copy the scaled logits and ids of the tile's tokens within the chosen distance."""
    i_n, i_tile, num_tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    b_temperature, b_top_k = tl.load(p_temperature + i_n), tl.load(p_top_k + i_n)
    b_top_p, b_min_p = tl.load(p_top_p + i_n), tl.load(p_min_p + i_n)
    if not is_filtered(b_temperature, b_top_k, b_top_p, b_min_p, V):
        return
    b_cut, _, _ = choose_cut(p_count, p_mass, i_n, num_tiles, b_top_k, b_top_p, b_min_p, V, CAPACITY, BT)
    if b_cut == _NUM_CUTS:
        return
    o_t = tl.arange(0, BT)
    p_counts = p_count + (i_n * num_tiles + o_t) * (_NUM_CUTS + 1) + b_cut
    b_first = tl.sum(tl.load(p_counts, mask=o_t < i_tile, other=0), 0)  # tokens of the tiles before
    o_token = i_tile * BN + tl.arange(0, BN)
    b_x = tl.load(p_logits + i_n * stride_logits + o_token, mask=o_token < V, other=float("-inf")).to(tl.float32)
    b_x = tl.div_rn(b_x, b_temperature)
    b_max = tl.div_rn(row_max(p_max, i_n, num_tiles, BT), b_temperature)
    m = b_x >= b_max - cut_distance(b_cut)
    o_out = i_n * CAPACITY + b_first + tl.cumsum(m.to(tl.int32), 0) - 1
    tl.store(p_found_x + o_out, b_x, mask=m)
    tl.store(p_found_token + o_out, o_token, mask=m)


@triton.jit
def load_token(p_row, p_found_x, p_found_token, o, num, b_temperature, USE_ROW):
    """Scaled logits and ids of the o-th tokens that are searched; -inf beyond `num`."""
    m = o < num
    b_row = tl.load(p_row + o, mask=m & USE_ROW, other=float("-inf")).to(tl.float32)
    b_found = tl.load(p_found_x + o, mask=m & (USE_ROW == 0), other=float("-inf"))
    b_token = tl.load(p_found_token + o, mask=m & (USE_ROW == 0), other=0)
    return tl.where(USE_ROW, tl.div_rn(b_row, b_temperature), b_found), tl.where(USE_ROW, o, b_token)


@triton.jit
def sum_above(
    p_row, p_found_x, p_found_token, num, b_temperature, USE_ROW, b_max, b_key0, b_key1, b_key2,
    BY_MASS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Number (or mass) of the tokens whose keys lie above each of three."""
    o = tl.arange(0, BN)
    b_sum0 = tl.zeros([BN], dtype=tl.float32)
    b_sum1 = tl.zeros([BN], dtype=tl.float32)
    b_sum2 = tl.zeros([BN], dtype=tl.float32)
    for i in range(0, num, BN):
        b_x, _ = load_token(p_row, p_found_x, p_found_token, i + o, num, b_temperature, USE_ROW)
        b_weight = tl.where(i + o < num, 1.0, 0.0)
        if BY_MASS:
            b_weight = tl.exp2((b_x - b_max) * LOG2_E)
        b_key = to_key(b_x)
        b_sum0 += tl.where(b_key > b_key0, b_weight, 0.0)
        b_sum1 += tl.where(b_key > b_key1, b_weight, 0.0)
        b_sum2 += tl.where(b_key > b_key2, b_weight, 0.0)
    return tl.sum(b_sum0, 0), tl.sum(b_sum1, 0), tl.sum(b_sum2, 0)


@triton.jit
def least_key(
    p_row, p_found_x, p_found_token, num, b_temperature, USE_ROW, b_max, b_target, b_lo, b_hi,
    BY_MASS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The least key in [b_lo, b_hi] (int64) above which lie less than b_target tokens (or mass)."""
    while b_lo < b_hi:
        b_key0 = b_lo + (b_hi - b_lo) // 4
        b_key1 = b_lo + (b_hi - b_lo) // 2
        b_key2 = b_lo + (b_hi - b_lo) * 3 // 4
        b_sum0, b_sum1, b_sum2 = sum_above(
            p_row, p_found_x, p_found_token, num, b_temperature, USE_ROW, b_max,
            b_key0.to(tl.int32), b_key1.to(tl.int32), b_key2.to(tl.int32), BY_MASS, BN,
        )  # fmt: skip
        b_hi = tl.where(
            b_sum0 < b_target, b_key0, tl.where(b_sum1 < b_target, b_key1, tl.where(b_sum2 < b_target, b_key2, b_hi))
        )
        b_lo = tl.where(
            b_sum0 < b_target,
            b_lo,
            tl.where(b_sum1 < b_target, b_key0 + 1, tl.where(b_sum2 < b_target, b_key1 + 1, b_key2 + 1)),
        )
    return b_hi


@quick_launch
@triton.jit(do_not_specialize_on_alignment=_ROWS)
def draw_kernel(
    p_logits, p_temperature, p_top_k, p_top_p, p_min_p, p_keys, p_positions, p_max, p_sum, p_best, p_token, p_count,
    p_mass, p_found_x, p_found_token, p_out, p_logprob, stride_logits, V, num_tiles,
    PURPOSE: tl.constexpr, CAPACITY: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (N,): thresholds and draw of rows with a filter, best of the tiles for the others; then the logprob."""
    i_n = tl.program_id(0).to(tl.int64)
    b_temperature, b_top_k = tl.load(p_temperature + i_n), tl.load(p_top_k + i_n)
    b_top_p, b_min_p = tl.load(p_top_p + i_n), tl.load(p_min_p + i_n)
    o_t = tl.arange(0, BT)
    m_t = o_t < num_tiles
    b_maxima = tl.load(p_max + i_n * num_tiles + o_t, mask=m_t, other=float("-inf"))
    b_sums = tl.load(p_sum + i_n * num_tiles + o_t, mask=m_t, other=0.0)
    b_row_max = tl.max(b_maxima, 0)
    b_log_sum = tl.log2(tl.sum(b_sums * tl.exp2((b_maxima - b_row_max) * LOG2_E), 0)) * LN_2 + b_row_max
    p_row = p_logits + i_n * stride_logits
    b_token = V + 0
    if is_filtered(b_temperature, b_top_k, b_top_p, b_min_p, V):
        p_x, p_id = p_found_x + i_n * CAPACITY, p_found_token + i_n * CAPACITY
        b_cut, num, b_total = choose_cut(
            p_count, p_mass, i_n, num_tiles, b_top_k, b_top_p, b_min_p, V, CAPACITY, BT
        )  # fmt: skip
        USE_ROW = b_cut == _NUM_CUTS
        b_max = tl.div_rn(b_row_max, b_temperature)
        b_high = to_key(b_max).to(tl.int64)
        b_low = to_key(tl.where(USE_ROW, float("-inf"), b_max - cut_distance(b_cut))).to(tl.int64)
        b_least = b_low
        has_top_k = (b_top_k > 0) & (b_top_k < V)
        if has_top_k:
            b_least = least_key(
                p_row, p_x, p_id, num, b_temperature, USE_ROW, b_max, b_top_k.to(tl.float32), b_low, b_high, False, BN
            )  # fmt: skip
        if b_min_p > 0.0:
            b_least = tl.maximum(b_least, to_key(b_max + tl.log(b_min_p)).to(tl.int64))
        if b_top_p < 1.0:
            if has_top_k | (b_min_p > 0.0):  # the mass that the other filters leave
                b_under = (b_least - 1).to(tl.int32)
                b_total, _, _ = sum_above(
                    p_row, p_x, p_id, num, b_temperature, USE_ROW, b_max, b_under, b_under, b_under, True, BN
                )  # fmt: skip
            b_least = least_key(
                p_row, p_x, p_id, num, b_temperature, USE_ROW, b_max, b_top_p * b_total, b_least, b_high, True, BN
            )  # fmt: skip
        b_least_x = from_key(b_least.to(tl.int32))
        b_seed = tl.load(p_keys + i_n * 2)
        b_choice = tl.load(p_keys + i_n * 2 + 1).to(tl.int32)
        b_position = tl.load(p_positions + i_n).to(tl.int32)
        b_best = float("-inf")
        for i in range(0, num, BN):
            o = i + tl.arange(0, BN)
            b_x, o_token = load_token(p_row, p_x, p_id, o, num, b_temperature, USE_ROW)
            b_score = token_perturb(b_x, o_token, b_seed, b_choice, b_position, PURPOSE)
            m = (o < num) & (b_x >= b_least_x)
            b_score = tl.where(m, b_score, float("-inf"))
            b_tile_best = tl.max(b_score, 0)
            b_tile_token = tl.min(tl.where(m & (b_score == b_tile_best), o_token, V), 0)
            b_token = tl.where(b_tile_best > b_best, b_tile_token, b_token)
            b_best = tl.maximum(b_tile_best, b_best)
    else:
        b_scores = tl.load(p_best + i_n * num_tiles + o_t, mask=m_t, other=float("-inf"))
        b_tokens = tl.load(p_token + i_n * num_tiles + o_t, mask=m_t, other=V)
        b_token = tl.min(tl.where(m_t & (b_scores == tl.max(b_scores, 0)), b_tokens, V), 0)
    b_token = tl.minimum(b_token, V - 1)  # a row of NaN has no best token; its id must still be one
    tl.store(p_out + i_n, b_token.to(tl.int64))
    tl.store(p_logprob + i_n, tl.load(p_row + b_token).to(tl.float32) - b_log_sum)


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    *,
    purpose: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract of `app.kernels.sampling.sample_tokens` on a GPU; the logits are left as they are."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "logits rows must be contiguous"
    device, num_tiles = logits.device, cdiv(vocab_size, _TILE)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return token_ids, logprobs
    # Three tensors and not one: parts of one start at addresses for which Triton compiles the kernels once more.
    maxima, sums, best = (torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device) for _ in range(3))
    best_token = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, num_tiles, _NUM_CUTS.value + 1, dtype=torch.int32, device=device)
    masses = torch.empty(num_rows, num_tiles, _NUM_CUTS.value + 1, dtype=torch.float32, device=device)
    capacity = min(_CAPACITY, vocab_size)
    found_x = torch.empty(num_rows, capacity, dtype=torch.float32, device=device)
    found_token = torch.empty(num_rows, capacity, dtype=torch.int32, device=device)
    rows = (logits, temperature, top_k, top_p, min_p)
    draw = (keys.contiguous(), positions.contiguous())
    shape = (logits.stride(0), vocab_size)
    tiles = {"BN": _TILE, "BT": next_power_of_2(num_tiles), "num_warps": 4}
    grid = (num_rows, num_tiles)
    read_kernel[grid](*rows, *draw, maxima, sums, best, best_token, *shape, PURPOSE=purpose, BN=_TILE, num_warps=4)
    count_kernel[grid](*rows, maxima, counts, masses, *shape, **tiles)
    gather_kernel[grid](*rows, maxima, counts, masses, found_x, found_token, *shape, CAPACITY=capacity, **tiles)
    draw_kernel[(num_rows,)](
        *rows, *draw, maxima, sums, best, best_token, counts, masses, found_x, found_token, token_ids, logprobs, *shape,
        num_tiles, PURPOSE=purpose, CAPACITY=capacity, **{**tiles, "num_warps": 8},
    )  # fmt: skip
    return token_ids, logprobs
