# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Attention of encoders over ragged rows: texts lie side by side, nothing is padded, gathered or put back.

A program attends a tile of one text's tokens, of one head, to all tokens that the tile sees. Which tiles there are is a
list made once a step, the longest texts first, so that the last programs to begin are short ones. Tiles of keys that
every token sees skip the mask. Tiling and online softmax are those of FlashAttention-2 (Dao, 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from app.kernels.attention.encoder import TILE_KERNELS, ScoreBias, Sight, TiledPlan
from app.kernels.attention.encoder_groups import GroupPlan
from app.kernels.attention.triton_tile import LOG2_E, NO_MAX, head_columns
from app.kernels.kernel_table import Kernel, chosen
from app.kernels.launch import next_power_of_2, shared_memory
from app.kernels.quick_launch import quick_launch
from app.platforms.to_device import to_device

ROWS = 64  # tokens of a tile: what a warp group multiplies at once; more leave short texts' tiles empty
LONG = 1024  # tokens of a text
_LARGE_TILE_BYTES = 99 << 10  # of shared memory: what the largest tiles need


@dataclass(slots=True, frozen=True)
class EncoderTile:
    """Tile sizes and launch options: `rows` tokens meet `keys` of them at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def choose_tile(head_dim: int, dtype: torch.dtype, shared_bytes: int = 227 << 10) -> EncoderTile:
    """A table by head size and dtype. Full fp32 has no tensor cores."""
    padded = next_power_of_2(head_dim)
    if dtype == torch.float32:
        return EncoderTile(ROWS, 16, num_warps=4, num_stages=1)
    if shared_bytes < _LARGE_TILE_BYTES:  # AMD's have 64 KiB; not swept there
        return EncoderTile(ROWS, 32, num_warps=4, num_stages=1)
    if padded <= 128:  # swept on an H200 at 64, 80 and 128 (benchmarks/RESULTS.md)
        return EncoderTile(ROWS, 64, num_warps=4, num_stages=3)
    return EncoderTile(ROWS, 32, num_warps=4, num_stages=1)


@triton.jit
def _meet(
    b_q, b_acc, b_sum, b_max, p_k, p_v, p_seen, i_n, o_place, length, factor, window, stride_k, stride_v,
    D: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr, USE_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold keys and values i_n .. i_n + BN of the text into (b_acc, b_sum, b_max) and return them."""
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    m_n = o_n < length
    p_keys = p_k + o_n[:, None] * stride_k + o_d[None, :]
    p_values = p_v + o_n[:, None] * stride_v + o_d[None, :]
    if MASKED:
        b_k = tl.load(p_keys, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
    elif D == BD:
        b_k = tl.load(p_keys)
    else:
        b_k = tl.load(p_keys, mask=o_d[None, :] < D, other=0.0)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASKED:
        m_s = m_n[None, :]
        if p_seen is not None:
            m_s = m_s & tl.load(p_seen + o_n, mask=m_n, other=0).to(tl.int1)[None, :]
        if USE_WINDOW:
            b_apart = o_place[:, None] - o_n[None, :]
            m_s = m_s & (b_apart < window) & (b_apart > -window)
        if IS_CAUSAL:
            m_s = m_s & (o_n[None, :] <= o_place[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * factor)
    b_scale = tl.exp2(b_max - b_new_max)
    b_p = tl.exp2(b_s * factor - b_new_max[:, None])
    b_sum = b_sum * b_scale + tl.sum(b_p, 1)
    if MASKED:
        b_v = tl.load(p_values, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
    elif D == BD:
        b_v = tl.load(p_values)
    else:
        b_v = tl.load(p_values, mask=o_d[None, :] < D, other=0.0)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_scale[:, None], input_precision=PRECISION)
    return b_acc, b_sum, b_new_max


@quick_launch
@triton.jit(do_not_specialize=["window"])
def encoder_kernel(
    p_q, p_k, p_v, p_seen, p_out, p_tiles, scale, window,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_out_token, stride_out_head,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    USE_WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, H): p_tiles int32 [tiles, 3] has a text's first row, its length, and the tile's first token."""
    p_tile = p_tiles + tl.program_id(0) * 3
    i_head = tl.program_id(1)
    length = tl.load(p_tile + 1)
    if length == 0:  # pads the list
        return
    i_row = tl.load(p_tile).to(tl.int64)
    first = tl.load(p_tile + 2)
    o_place = first + tl.arange(0, BM)
    o_d = tl.arange(0, BD)
    m_q = (o_place < length)[:, None] & (o_d[None, :] < D)
    p_rows = p_q + i_row * stride_q_token + i_head * stride_q_head
    b_q = tl.load(p_rows + o_place[:, None] * stride_q_token + o_d[None, :], mask=m_q, other=0.0)
    p_k += i_row * stride_k_token + (i_head // G) * stride_k_head
    p_v += i_row * stride_v_token + (i_head // G) * stride_v_head
    if p_seen is not None:
        p_seen += i_row
    b_acc = tl.zeros([BM, BD], dtype=tl.float32)
    b_sum = tl.zeros([BM], dtype=tl.float32)
    b_max = tl.zeros([BM], dtype=tl.float32) + NO_MAX
    factor = scale * LOG2_E  # to base-2 scores; applied after the maximum, where it fuses with the subtraction
    low = 0
    high = length
    whole = length // BN * BN  # tiles of keys before it need no mask
    if IS_CAUSAL:
        high = tl.minimum(length, first + BM)
        whole = (first + 1) // BN * BN
    if USE_WINDOW:
        low = tl.maximum(first - window + 1, 0) // BN * BN
        high = tl.minimum(high, first + BM - 1 + window)
        whole = low
    if p_seen is not None:
        whole = low
    for i_n in range(low, whole, BN):
        b_acc, b_sum, b_max = _meet(
            b_q, b_acc, b_sum, b_max, p_k, p_v, p_seen, i_n, o_place, length, factor, window,
            stride_k_token, stride_v_token, D, BN, BD, False, False, False, PRECISION,
        )  # fmt: skip
    for i_n in range(whole, high, BN):
        b_acc, b_sum, b_max = _meet(
            b_q, b_acc, b_sum, b_max, p_k, p_v, p_seen, i_n, o_place, length, factor, window,
            stride_k_token, stride_v_token, D, BN, BD, True, USE_WINDOW, IS_CAUSAL, PRECISION,
        )  # fmt: skip
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]  # who sees nothing gets 0
    p_o = p_out + i_row * stride_out_token + i_head * stride_out_head
    tl.store(p_o + o_place[:, None] * stride_out_token + o_d[None, :], b_out.to(p_out.dtype.element_ty), mask=m_q)


def list_tiles(starts: list[int], rows: int = ROWS, *, is_causal: bool = False) -> NDArray[np.int32]:
    """The tiles of a step, int32 [tiles, 3]: see `encoder_kernel`. Those that see most come first: of the longest
    texts, or, where it `is_causal`, the last of each."""
    firsts = np.array(starts, dtype=np.int64)
    lengths = np.diff(firsts)
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths[order] // rows)
    text = np.repeat(order, counts)
    place = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack((firsts[text], lengths[text], place * rows), axis=1).astype(np.int32)
    if not is_causal:
        return tiles
    return tiles[np.argsort(-np.minimum(tiles[:, 2] + rows, tiles[:, 1]), kind="stable")]


class TilePlan(TiledPlan):
    """One step's texts as a list of tiles."""

    def __init__(self, starts: list[int], device: torch.device, *, is_causal: bool = False) -> None:
        self._starts, self._device, self._kernels = starts, device, TILE_KERNELS.all_on(device)
        self._groups: GroupPlan | None = None
        self._is_even = len({end - start for start, end in pairwise(starts)}) == 1 and starts[1] - starts[0] >= LONG
        self.tiles = to_device(list_tiles(starts, is_causal=is_causal), device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        bias: ScoreBias | None = None,
        seen: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """See EncoderPlan; what is added to scores, PyTorch adds."""
        if bias is not None or (self._is_even and window is None and seen is None and _leaves_gaps(query, key)):
            self._groups = self._groups or GroupPlan(self._starts, self._device)
            return self._groups.attend(query, key, value, scale, window, bias, seen, is_causal=is_causal)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sight = Sight(scale, window, seen, is_causal)
        run, _ = chosen(self._kernels, query, key, value, sight)
        run(query, key, value, out, self.tiles, sight)
        return out


class StaticPlan(TiledPlan):
    """The texts of whatever tiles lie in a tensor when the step runs; they cover its tokens."""

    def __init__(self, tiles: torch.Tensor) -> None:
        self.tiles, self._kernels = tiles, TILE_KERNELS.all_on(tiles.device)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
        bias: ScoreBias | None = None,
        seen: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """See EncoderPlan."""
        assert bias is None, "what is added to scores is made text by text"
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        sight = Sight(scale, window, seen, is_causal)
        run, _ = chosen(self._kernels, query, key, value, sight)
        run(query, key, value, out, self.tiles, sight)
        return out


def _leaves_gaps(query: torch.Tensor, key: torch.Tensor) -> bool:
    """True for heads that fill no tile: of long texts of one length, such as pictures, PyTorch's kernels are faster."""
    return query.shape[2] != next_power_of_2(query.shape[2]) and query.shape[1] == key.shape[1]


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    sight: Sight,
    tile: EncoderTile | None = None,
) -> None:
    """Write out [T, H, D] for the texts that `tiles` lists."""
    num_heads, head_dim = query.shape[1:]
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "heads must be contiguous"
    tile = tile or choose_tile(head_dim, query.dtype, shared_memory(query.device))
    if not len(tiles):
        return
    encoder_kernel[(len(tiles), num_heads)](
        query, key, value, sight.seen, out, tiles, sight.scale, sight.window or 0,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out.stride()[:2],
        G=num_heads // key.shape[1], D=head_dim, BM=tile.rows, BN=tile.keys, BD=head_columns(head_dim),
        USE_WINDOW=sight.window is not None, IS_CAUSAL=sight.is_causal,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sight: Sight) -> bool:
    return True


KERNEL = Kernel(_serves, launch)
