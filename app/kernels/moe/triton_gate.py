# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Gates on a GPU: a gate's product, scores, top-k and weights in one launch.

The product of a few tokens with a gate's weight takes several programs to read the weight in time: each multiplies some
experts, over a share of K. The program of some tokens that comes last adds the shares up, in a fixed order, and
chooses. Many tokens' logits are a library's product, but on AMD's GPUs, and the choosing a launch behind it, whose
programs are small; logits given as they are need the choosing alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from app.kernels.gemm import Activations, DeferredNorm
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.launch import cdiv, early_launch, next_power_of_2
from app.kernels.moe import LEAST_SUM, Routing, RoutingRule
from app.kernels.quick_launch import quick_launch

_LEAST_SUM = tl.constexpr(LEAST_SUM)
_TAKEN = tl.constexpr(-(1 << 31))  # less than all keys
MOST_IN_ONE = 16  # tokens whose product and choice are one launch; in fp32, and on AMD's GPUs, any number
_SPLITS = 4  # of K; the same for any number of tokens (I6)


@triton.jit
def keep_groups(b_choice, BT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, G: tl.constexpr, KEEP: tl.constexpr,
                TOP2: tl.constexpr):  # fmt: skip
    """b_choice [BT, BG * BS] with -inf for the experts of groups that are not among the best."""
    b_in = tl.reshape(b_choice, [BT, BG, BS])
    b_worth = tl.max(b_in, 2)
    if TOP2:
        o_s = tl.arange(0, BS)[None, None, :]
        b_first = tl.min(tl.where(b_in == b_worth[:, :, None], o_s, BS), 2)
        b_worth += tl.max(tl.where(o_s == b_first[:, :, None], -float("inf"), b_in), 2)
    o_g = tl.arange(0, BG)[None, :]
    b_worth = tl.where(o_g < G, b_worth, -float("inf"))
    b_kept = tl.zeros([BT, BG], dtype=tl.int32)
    for _ in tl.static_range(KEEP):
        b_left = tl.where(b_kept > 0, -float("inf"), b_worth)
        b_best = tl.min(tl.where((b_left == tl.max(b_left, 1)[:, None]) & (b_kept == 0), o_g, BG), 1)
        b_kept = tl.where(o_g == b_best[:, None], 1, b_kept)
    b_in = tl.where(b_kept[:, :, None] > 0, b_in, -float("inf"))
    return tl.reshape(b_in, [BT, BG * BS])


@triton.jit
def in_order(b_x):
    """int32 in the order of fp32 numbers: of 32 bits a warp finds the largest in one instruction."""
    b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # + 0: the two zeros are equal
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def number_of(b_key):
    """The number that a key stands for."""
    return tl.where(b_key < 0, b_key ^ 0x7FFFFFFF, b_key).to(tl.float32, bitcast=True)


@triton.jit
def choose(
    b_logits, b_own, o_e, m_e, p_correction, p_slots, p_ids, p_weights, o_t, m_t, scale, jitter,
    E: tl.constexpr, G: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr, BS: tl.constexpr, KEEP: tl.constexpr,
    TOP2: tl.constexpr, TOP: tl.constexpr, BTOP: tl.constexpr, SHARED: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, LOGITS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Ids and weights of tokens o_t [BT] by fp32 logits [BT, BG * BS], whose columns are the experts o_e if m_e, and
    b_own [BT], if there are any, of the shared ones."""
    b_logits = b_logits.to(LOGITS).to(tl.float32)
    b_logits = tl.where(m_e & (b_logits == b_logits), b_logits, -float("inf"))  # NaN: chosen last
    b_max = tl.max(b_logits, 1)[:, None]
    b_scores = tl.exp(b_logits - b_max)
    b_total = tl.sum(b_scores, 1)[:, None]
    b_scores = b_scores / b_total
    if SCORING == "sigmoid":
        b_scores = tl.sigmoid(b_logits)
    b_choice = b_logits
    if p_correction is not None or G > 1:
        b_choice = b_scores
        if p_correction is not None:
            b_choice += tl.load(p_correction + o_e, mask=m_e, other=0.0)
        b_choice = tl.where(m_e, b_choice, -float("inf"))
        if G > 1:
            b_choice = keep_groups(b_choice, BT, BG, BS, G, KEEP, TOP2)
    b_keys = tl.where(m_e, in_order(b_choice), _TAKEN)
    o_k = tl.arange(0, BTOP)[None, :]
    b_ids = E - TOP + o_k + tl.zeros([BT, BTOP], dtype=tl.int32)  # the shared ones come after the chosen
    b_weights = tl.full([BT, BTOP], 1.0, dtype=tl.float32)
    b_sum = tl.zeros([BT, 1], dtype=tl.float32)
    for i in tl.static_range(TOP):
        b_key = tl.max(b_keys, 1)[:, None]
        b_id = tl.min(tl.where(b_keys == b_key, o_e, 0x7FFFFFFF), 1)[:, None]  # of equal ones the lowest
        m_id = m_e & (o_e == b_id)
        b_best = number_of(b_key)
        if SCORING == "sparsemixer":
            m_far = (b_best - b_logits) / tl.maximum(tl.abs(b_logits), b_best) > 2 * jitter
            b_power = tl.where(m_far | (b_keys == _TAKEN), 0.0, tl.exp(b_logits - b_best))
            b_weight = 1.0 / tl.sum(b_power, 1)[:, None]
        elif p_correction is not None:
            b_weight = tl.sum(tl.where(m_id, b_scores, 0.0), 1)[:, None]
        elif G > 1:
            b_weight = b_best  # chosen by its score
        elif SCORING == "sigmoid":
            b_weight = tl.sigmoid(b_best)
        else:
            b_weight = tl.exp(b_best - b_max) / b_total
        b_keys = tl.where(m_id, _TAKEN, b_keys)
        b_ids = tl.where(o_k == i, b_id, b_ids)
        b_weights = tl.where(o_k == i, b_weight, b_weights)
        b_sum += b_weight
    if SCORING == "softmax_of_chosen":
        b_weights = b_weights / b_sum
    if RENORMALIZE:
        b_weights = b_weights / (b_sum + _LEAST_SUM)
    b_shared = 1.0
    if b_own is not None:
        b_shared = tl.sigmoid(b_own.to(LOGITS).to(tl.float32))[:, None]
    b_weights = tl.where(o_k < TOP, (b_weights * scale).to(WEIGHTS).to(tl.float32), b_shared)
    if p_slots is not None:
        b_slots = tl.load(p_slots + o_t, mask=m_t, other=-1)
        b_ids = tl.where(b_slots[:, None] < 0, -1, b_ids)
    o = o_t[:, None] * (TOP + SHARED) + o_k
    m = m_t[:, None] & (o_k < TOP + SHARED)
    tl.store(p_ids + o, b_ids, mask=m)
    tl.store(p_weights + o, b_weights, mask=m)


@triton.jit
def own_logits(p_rows, p_weight, o_t, m_t, K, stride_rows, BT: tl.constexpr, BK: tl.constexpr):
    """fp32 [BT]: rows o_t of p_rows [T, K] times the one row p_weight [K]."""
    b_parts = tl.zeros([BT, BK], dtype=tl.float32)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        m = m_t[:, None] & (o_k < K)[None, :]
        b_x = tl.load(p_rows + o_t[:, None].to(tl.int64) * stride_rows + o_k[None, :], mask=m, other=0.0)
        b_w = tl.load(p_weight + o_k, mask=o_k < K, other=0.0)
        b_parts += b_x.to(tl.float32) * b_w[None, :].to(tl.float32)
    return tl.sum(b_parts, 1)


@quick_launch
@triton.jit(do_not_specialize=["T"])
def gate_kernel(
    p_x, p_rows, p_weight, p_bias, p_squares, p_correction, p_slots, p_shares, p_arrived, p_ids, p_weights, T, K,
    stride_x, stride_rows, eps, scale, jitter,
    E: tl.constexpr, OWN: tl.constexpr, G: tl.constexpr, S: tl.constexpr, P: tl.constexpr, BP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
    BS: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr, TOP: tl.constexpr, BTOP: tl.constexpr,
    SHARED: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, LOGITS: tl.constexpr,
    WEIGHTS: tl.constexpr, TYPE: tl.constexpr, PRODUCT: tl.constexpr, ROUNDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of E * SPLITS, tiles of T). PRODUCT: x [T, K] times p_weight [E + OWN, K], whose shares of K are
    summed by the last program of a tile of T; else x [T, E + OWN] are logits, or [T, E] and p_weight [K] times p_rows
    [T, K] are the shared ones'. p_arrived [tiles of T] is zero before and after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_t = tl.program_id(1)
    if PRODUCT:
        i_e, i_split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
        o_m, o_n = i_t * BM + tl.arange(0, BM), i_e * BN + tl.arange(0, BN)
        m_m, m_n = o_m < T, o_n < E
        share = tl.cdiv(tl.cdiv(K, SPLITS), BK) * BK
        start = i_split * share
        b_acc = tl.zeros([BM, BN], dtype=tl.float32)
        b_parts = tl.zeros([BM, BK], dtype=tl.float32)  # of one expert more, summed up at the end
        for i_k in range(start, tl.minimum(start + share, K), BK):
            o_k = i_k + tl.arange(0, BK)
            m_k = (o_k < K)[None, :]
            b_x = tl.load(p_x + o_m[:, None].to(tl.int64) * stride_x + o_k[None, :], mask=m_m[:, None] & m_k, other=0.0)
            b_w = tl.load(p_weight + o_n[:, None] * K + o_k[None, :], mask=m_n[:, None] & m_k, other=0.0)
            b_acc = tl.dot(b_x.to(TYPE), tl.trans(b_w.to(TYPE)), b_acc, input_precision="ieee")
            if OWN and i_e == 0:
                b_one = tl.load(p_weight + E * K + o_k, mask=o_k < K, other=0.0)
                b_parts += b_x.to(tl.float32) * b_one[None, :].to(tl.float32)
        size = T.to(tl.int64) * (E + OWN)
        p_share = p_shares + i_split * size + o_m[:, None] * (E + OWN) + o_n[None, :]
        tl.store(p_share, b_acc, mask=m_m[:, None] & m_n[None, :])
        if OWN and i_e == 0:
            tl.store(p_shares + i_split * size + o_m * (E + OWN) + E, tl.sum(b_parts, 1), mask=m_m)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(p_arrived + i_t, 1, sem="acq_rel")
        if arrived < tl.num_programs(0) - 1:
            return
        tl.debug_barrier()
        tl.store(p_arrived + i_t, 0)  # for the next launch
    o_j = tl.arange(0, BG * BS)[None, :]
    o_e = o_j // BS * S + o_j % BS
    m_e = (o_j // BS < G) & (o_j % BS < S)
    for i in tl.static_range(ROUNDS):
        o_t = i_t * BM + i * BT + tl.arange(0, BT)
        m_t = o_t < T
        m = m_t[:, None] & m_e
        b_own = None
        if PRODUCT:
            o = o_t[:, None] * (E + OWN) + o_e
            b_logits = tl.load(p_shares + o, mask=m, other=0.0, cache_modifier=".cg")
            for k in tl.static_range(1, SPLITS):
                b_logits += tl.load(p_shares + k * size + o, mask=m, other=0.0, cache_modifier=".cg")
            if OWN:
                o_own = o_t * (E + OWN) + E
                b_own = tl.load(p_shares + o_own, mask=m_t, other=0.0, cache_modifier=".cg")
                for k in tl.static_range(1, SPLITS):
                    b_own += tl.load(p_shares + k * size + o_own, mask=m_t, other=0.0, cache_modifier=".cg")
        else:
            p_logits = p_x + o_t[:, None].to(tl.int64) * stride_x + o_e
            b_logits = tl.load(p_logits, mask=m, other=0.0).to(tl.float32)
            if OWN:
                if p_rows is not None:
                    b_own = own_logits(p_rows, p_weight, o_t, m_t, K, stride_rows, BT, BK)
                else:
                    b_own = tl.load(p_x + o_t.to(tl.int64) * stride_x + E, mask=m_t, other=0.0).to(tl.float32)
        if p_squares is not None:
            o_p = tl.arange(0, BP)[None, :]
            b_squares = tl.load(p_squares + o_t[:, None] * P + o_p, mask=m_t[:, None] & (o_p < P), other=0.0)
            b_factor = tl.rsqrt(tl.sum(b_squares, 1) / K + eps)
            b_logits *= b_factor[:, None]
            if OWN:
                b_own *= b_factor
        if p_bias is not None:
            b_logits += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)
        choose(
            b_logits, b_own, o_e, m_e, p_correction, p_slots, p_ids, p_weights, o_t, m_t, scale, jitter, E, G, BT, BG,
            BS, KEEP, TOP2, TOP, BTOP, SHARED, SCORING, RENORMALIZE, LOGITS, WEIGHTS,
        )  # fmt: skip


@dataclass(slots=True, frozen=True)
class GateTile:
    """Tile sizes and launch options."""

    tokens: int
    experts: int
    depth: int
    splits: int
    num_warps: int
    num_stages: int
    is_fixed: bool = False  # a program chooses for as many tokens as ever, however few there are


def gate_tile(num_tokens: int, dtype: torch.dtype) -> GateTile:
    """The tile for so many tokens; in fp32 the same for all."""
    if dtype == torch.float32:
        return GateTile(16, 16, 64, _SPLITS, 4, 2)
    if num_tokens <= 2:  # choosing experts of more takes one warp three times as many instructions
        return GateTile(16, 16, 128, 8, 1, 4)
    if num_tokens <= 128:
        return GateTile(16, 16, 128, _SPLITS, 4, 4)
    if num_tokens <= 1024:
        return GateTile(16, 32, 128, 2, 4, 3)
    # On AMD's GPUs alone (see `gate`), whose shared memory holds so many stages.
    return GateTile(32, 128, 128, 2 if num_tokens <= 4096 else 1, 4, 2)


_CHOICE = GateTile(2, 16, 512, 1, 1, 1)  # of logits that are there: small programs choose soonest

_TYPES = {None: tl.float32, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@cache
def _rule_arguments(rule: RoutingRule, num_experts: int) -> dict[str, Any]:
    """Returns what the kernel knows of a rule."""
    groups, size = rule.num_groups, num_experts // rule.num_groups
    assert num_experts % groups == 0, (num_experts, rule)
    assert rule.top_k <= size * (rule.groups_chosen if groups > 1 else 1), (num_experts, rule)
    return {
        "scale": rule.scale, "jitter": rule.jitter, "E": num_experts, "OWN": int(rule.gates_shared), "G": groups,
        "S": size, "BG": next_power_of_2(groups), "BS": next_power_of_2(size), "KEEP": rule.groups_chosen,
        "TOP2": rule.group_score == "top2" and size > 1, "TOP": rule.top_k,
        "BTOP": next_power_of_2(rule.num_chosen), "SHARED": rule.num_shared, "SCORING": rule.scoring,
        "RENORMALIZE": rule.renormalize, "LOGITS": _TYPES[rule.logits_dtype], "WEIGHTS": _TYPES[rule.weights_dtype],
    }  # fmt: skip


def _launch(
    given: Activations, weight: torch.Tensor | None, bias: torch.Tensor | None, rule: RoutingRule,
    correction: torch.Tensor | None, slot_mapping: torch.Tensor | None, tile: GateTile,
    logits: torch.Tensor | None = None,
) -> Routing:  # fmt: skip
    """`logits` [T, E]: the product, but for that of the shared ones' row; without a weight they are `given`."""
    x, squares, eps = (given.rows, given.squares, given.eps) if isinstance(given, DeferredNorm) else (given, None, 0.0)
    num_tokens, device = x.shape[0], x.device
    num_experts = (x.shape[1] if weight is None else len(weight)) - rule.gates_shared
    ids = torch.empty(num_tokens, rule.num_chosen, dtype=torch.int32, device=device)
    weights = torch.empty(num_tokens, rule.num_chosen, dtype=torch.float32, device=device)
    shares = arrived = None
    columns = 1
    read, own, is_product = x, None, weight is not None and logits is None
    if weight is not None:
        assert weight.is_contiguous()
    if logits is not None and weight is not None:
        read = logits
        own, weight = (x, weight[num_experts:]) if rule.gates_shared else (None, None)
    if is_product:
        columns = cdiv(num_experts, tile.experts) * tile.splits
        size = num_experts + rule.gates_shared
        shares = torch.empty(tile.splits, num_tokens, size, dtype=torch.float32, device=device)
        arrived = arrival_counters(device)
    assert x.stride(1) == 1, "rows must be contiguous"
    is_wide = torch.float32 in (x.dtype, x.dtype if weight is None else weight.dtype)
    most = max(1, 2048 // next_power_of_2(num_experts))  # logits that a program holds at a time
    num_squares = 1 if squares is None else squares.shape[1]
    if num_tokens > 0:
        # In fp32 as many as ever: how a row is summed depends on it (I6).
        is_fixed = tile.is_fixed or x.dtype == torch.float32
        height = tile.tokens if is_fixed else min(tile.tokens, next_power_of_2(num_tokens))
        at_once = min(height, most)
        gate_kernel[(columns, cdiv(num_tokens, tile.tokens))](
            read, own, weight, bias, squares, correction, slot_mapping, shares, arrived, ids, weights, num_tokens,
            x.shape[1], read.stride(0), x.stride(0), eps,
            P=num_squares, BP=next_power_of_2(num_squares), BM=tile.tokens, BN=tile.experts, BK=tile.depth,
            SPLITS=tile.splits, BT=at_once, ROUNDS=height // at_once,
            TYPE=tl.float32 if is_wide else _TYPES[x.dtype], PRODUCT=is_product,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **_rule_arguments(rule, num_experts),
            **early_launch(device),
        )  # fmt: skip
    return Routing(ids, weights)


def route(
    logits: torch.Tensor,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Routing:
    """The same as `reference.route`."""
    tile = GateTile(16, 16, 16, 1, 4, 1, is_fixed=is_fixed)
    return _launch(logits, None, None, rule, correction, slot_mapping, tile)


def gate(
    x: Activations,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: RoutingRule,
    *,
    correction: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    tile: GateTile | None = None,
) -> Routing:
    """The same as `reference.gate`."""
    rows, num_experts = x.rows if isinstance(x, DeferredNorm) else x, len(weight) - rule.gates_shared
    wide = torch.float32 if torch.float32 in (rows.dtype, weight.dtype) else rows.dtype
    logits = None
    # On AMD's GPUs any number is one launch: PyTorch's product of 16 bits gives no fp32 there.
    is_apart = len(rows) > MOST_IN_ONE and wide != torch.float32 and torch.version.hip is None
    if tile is None and is_apart and rows.dtype == weight.dtype:
        tile, logits = _CHOICE, product_logits(rows, weight[:num_experts])
    tile = tile or gate_tile(len(rows), wide)
    return _launch(x, weight, bias, rule, correction, slot_mapping, tile, logits)


def product_logits(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 [T, E], by a library: rows [T, K] times weight [E, K], transposed."""
    if rows.is_cuda:
        return torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return rows.float() @ weight.float().t()
