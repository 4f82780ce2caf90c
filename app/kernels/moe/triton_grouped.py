# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Grouped products on a GPU: the rows of each expert times that expert's weight, rows gathered by index.

A pair is a token and one of its experts, t * K + k. Two kernels find the pairs of a tile in two ways. Where pairs are
few, each program looks through all ids for its expert's (`scan_product_kernel`): no sort before it, each weight is read
once. Where they are many, they come sorted by expert, with a list of tiles (`triton_sort.py`), and programs work
through the list (`sorted_product_kernel`). In both a tile is the same (`triton_tile.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from app.kernels.gemm import Activations, DeferredNorm, materialize
from app.kernels.gemm.stored import StoredTiles
from app.kernels.gemm.triton_small import arrival_counters
from app.kernels.kernel_table import FROM_AMPERE, Candidate, Kernel, KernelTable, chosen
from app.kernels.launch import cdiv, early_launch, multiprocessors, next_power_of_2, register_limit, shared_memory
from app.kernels.moe import GLU
from app.kernels.moe.gluon_few import NOT_IN_REGISTERS, few_product_kernel, serves_registers
from app.kernels.moe.gluon_wide import wide_product
from app.kernels.moe.triton_sort import SortedPairs
from app.kernels.moe.triton_tile import expert_tile
from app.kernels.quick_launch import quick_launch


@dataclass(slots=True, frozen=True)
class GroupedTile:
    """Tile sizes and launch options of a grouped product."""

    rows: int
    columns: int  # of gate and up: so many of each
    depth: int
    num_warps: int
    num_stages: int
    swap: bool = False  # weight times tokens, instead of tokens times weight
    tma: bool = False  # the weight's tiles come by the tensor memory accelerator
    splits: int = 1  # parts that few bits' K is cut into
    ahead: int = 0  # blocks of few bits that are on their way to registers (gluon_few.py); 0: through shared memory
    registers: int | None = None  # of a thread, at most
    is_wide: bool = False  # few bits: weights are multiplied by their scales, not sums
    programs: int = 0  # of a persistent grid, for each multiprocessor; 0: a program a tile
    in_gluon: bool = False  # the kernel for Hopper GPUs, whose tiles have 128 rows: plain weights, sorted pairs


@quick_launch
@triton.jit(do_not_specialize=["num_pairs"])
def scan_product_kernel(
    p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_ids, p_out, p_shares,
    p_arrived, num_pairs, N, K,
    stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset,
    DIV: tl.constexpr, BPAIRS: tl.constexpr, BY_PAIR: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of N, experts, SPLITS) or, BY_PAIR, (tiles of N, pairs, SPLITS), where the first of an expert's pairs
    does all. x has a row for DIV pairs. SPLITS > 1: no expert has more than BM pairs; p_arrived [tiles of N * experts]
    is zero before and after."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    i_n, i_e, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_pair = tl.arange(0, BPAIRS)
    b_ids = tl.load(p_ids + o_pair, mask=o_pair < num_pairs, other=-1)
    if BY_PAIR:
        i_pair = i_e
        i_e = tl.load(p_ids + i_pair)
        if (i_e < 0) | (tl.min(tl.where(b_ids == i_e, o_pair, BPAIRS), 0) < i_pair):
            return
    m_mine = b_ids == i_e
    b_rank = tl.cumsum(m_mine.to(tl.int32), 0) - 1
    count = tl.sum(m_mine.to(tl.int32), 0)
    if SPLITS > 1:
        p_arrived += tl.program_id(1) * tl.num_programs(0) + i_n
    for start in range(0, count, BM):
        o_m = start + tl.arange(0, BM)
        m_hit = m_mine[None, :] & (b_rank[None, :] == o_m[:, None])
        b_pair = tl.sum(tl.where(m_hit, o_pair[None, :], 0), 1)
        expert_tile(
            p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_out, p_shares, p_arrived, i_e,
            i_n, i_split, b_pair // DIV, b_pair, b_pair, o_m < count, num_pairs,
            N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset, P, BP, BM, BN,
            BK, GATED, ACT, HAS_LIMIT, SWAP, TMA, EVEN_N, EVEN_K, PRECISION, FORM, G, ROWS, TABLES,
            WIDE, SPLITS,
        )  # fmt: skip


@quick_launch
@triton.jit(do_not_specialize=["MOST_TILES"])
def sorted_product_kernel(
    p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_order, p_tiles, p_num_tiles,
    p_out, N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset, MOST_TILES,
    DIV: tl.constexpr, X_SORTED: tl.constexpr, OUT_SORTED: tl.constexpr,
    P: tl.constexpr, BP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, HAS_LIMIT: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    TABLES: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (programs,), which share the tiles: all columns of one tile of rows before the next, so that neighbours read
    the same rows and the same expert. p_tiles [3, MOST_TILES]: expert, first place in the order, number of rows."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    tiles_n = tl.cdiv(N, BN)
    num_tiles = tl.load(p_num_tiles) * tiles_n
    for i in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_tile, i_n = i // tiles_n, i % tiles_n
        i_e = tl.load(p_tiles + i_tile)
        start = tl.load(p_tiles + MOST_TILES + i_tile)
        o_m = tl.arange(0, BM)
        m_m = o_m < tl.load(p_tiles + 2 * MOST_TILES + i_tile)
        b_pair = tl.load(p_order + start + o_m, mask=m_m, other=0)
        b_row = start + o_m if X_SORTED else b_pair // DIV
        b_out = start + o_m if OUT_SORTED else b_pair
        expert_tile(
            p_x, weight, p_scales, p_offsets, p_table, p_bias, p_squares, p_weights, p_out, None, None, i_e, i_n, 0,
            b_row, b_pair, b_out, m_m, 0,
            N, K, stride_x, row, num_groups, num_scales, per, num_blocks, eps, limit, alpha, up_offset, P, BP, BM, BN,
            BK, GATED, ACT, HAS_LIMIT, SWAP, TMA, EVEN_N, EVEN_K, PRECISION, FORM, G, ROWS, TABLES,
            WIDE, SPLITS,
        )  # fmt: skip


@dataclass(slots=True, frozen=True)
class Product:
    """One of the two grouped products of a layer: its weight and what rides along."""

    # [E, N or 2 N, K]; of few bits: every tensor of it with a leading dimension of experts
    weight: torch.Tensor | StoredTiles
    bias: torch.Tensor | None  # [E, N or 2 N]
    activation: GLU | None = None  # gate and up, with their activation; None: of down
    pair_weights: torch.Tensor | None = None  # fp32 [T, K]: multiply the rows before biases

    @property
    def is_gated(self) -> bool:
        """True if rows of gate lie above those of up."""
        return self.activation is not None and self.activation.has_gate

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(E, columns of the result, K)."""
        if isinstance(self.weight, torch.Tensor):
            num_experts, rows, size = self.weight.shape
        else:
            num_experts, rows, size = *self.weight.words.shape[:2], self.weight.size
        return num_experts, rows // 2 if self.is_gated else rows, size

    def splits(self, tile: GroupedTile) -> int:
        """Parts of K: those of the tile, if none is empty then."""
        if isinstance(self.weight, torch.Tensor):
            return 1
        num_blocks = cdiv(self.weight.size, self.weight.block)
        return cdiv(num_blocks, cdiv(num_blocks, min(tile.splits, num_blocks)))

    def ahead(self, tile: GroupedTile, rows: torch.Tensor) -> int | None:
        """Blocks of a weight of few bits that come to registers ahead; None: through shared memory."""
        weight = self.weight
        if isinstance(weight, torch.Tensor) or not serves_registers(rows, weight.form, self.activation):
            return None
        num_blocks, splits = cdiv(weight.size, weight.block), self.splits(tile)
        return min(tile.ahead, num_blocks - (splits - 1) * cdiv(num_blocks, splits)) or None

    def arguments(self, x: Activations, tile: GroupedTile) -> dict[str, Any]:
        """Returns what both kernels take."""
        rows, squares, eps = (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, 0.0)
        num_squares = 1 if squares is None else squares.shape[1]
        glu, (_, columns, size) = self.activation or GLU(), self.sizes
        assert rows.stride(1) == 1, "rows must be contiguous"
        given = (self._plain if isinstance(self.weight, torch.Tensor) else self._stored)(rows, tile)
        return given | {
            "p_x": rows, "p_bias": self.bias, "p_squares": squares, "p_weights": self.pair_weights,
            "N": columns, "K": size, "stride_x": rows.stride(0), "eps": eps,
            "limit": glu.limit or 0.0, "alpha": glu.alpha, "up_offset": glu.up_offset,
            "P": num_squares, "BP": next_power_of_2(num_squares), "BM": tile.rows, "BN": tile.columns,
            "GATED": self.is_gated, "ACT": glu.function, "HAS_LIMIT": glu.limit is not None,
            "EVEN_N": columns % tile.columns == 0, "EVEN_K": size % given["BK"] == 0,
            "PRECISION": "ieee" if rows.dtype == torch.float32 else "tf32",
            "num_warps": tile.num_warps, **early_launch(rows.device),
        }  # fmt: skip

    def _plain(self, rows: torch.Tensor, tile: GroupedTile) -> dict[str, Any]:
        """Returns what a plain weight brings."""
        weight, size = self.weight, self.sizes[2]
        assert isinstance(weight, torch.Tensor)
        assert weight.is_contiguous()
        itemsize = rows.element_size()
        # Each stage buffers a tile of rows and of each weight.
        height = tile.rows + tile.columns * (2 if self.is_gated else 1)
        stages = max(1, min(tile.num_stages, shared_memory(rows.device) // (height * tile.depth * itemsize)))
        is_descriptor = tile.tma and size * itemsize % 16 == 0
        return _NOT_STORED | {
            "weight": TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.depth])
            if is_descriptor else weight,
            "BK": tile.depth, "SWAP": tile.swap, "TMA": is_descriptor, "num_stages": stages,
        }  # fmt: skip

    def _stored(self, rows: torch.Tensor, tile: GroupedTile) -> dict[str, Any]:
        """Returns what a weight of few bits brings; its block is the depth of a tile."""
        weight = self.weight
        assert isinstance(weight, StoredTiles)
        parts = weight.scales_of_block
        assert parts is not None, "no kernel reads such groups"
        num_blocks = cdiv(weight.size, weight.block)
        return {
            "weight": weight.words, "p_scales": weight.scales, "p_offsets": weight.offsets, "p_table": weight.table,
            "row": weight.words.shape[2], "num_groups": weight.scales.shape[1], "num_scales": weight.scales.shape[2],
            "per": num_blocks if weight.group >= weight.size else weight.group * parts // weight.block,
            "num_blocks": num_blocks, "FORM": weight.form, "G": parts,
            "ROWS": weight.scale_rows, "TABLES": weight.table is not None and weight.table.dim() == 3,
            "BK": weight.block, "SWAP": True, "TMA": False, "WIDE": tile.is_wide,
            "num_stages": tile.num_stages,
        }  # fmt: skip


_NOT_STORED: dict[str, Any] = {
    "p_scales": None, "p_offsets": None, "p_table": None, "row": 0, "num_groups": 0, "num_scales": 0, "per": 1,
    "num_blocks": 0, "FORM": "plain", "G": 0, "ROWS": 1, "TABLES": False, "WIDE": False,
}  # fmt: skip


def scan_product(product: Product, x: Activations, ids: torch.Tensor, per_row: int, tile: GroupedTile) -> torch.Tensor:
    """x [T * K / per_row, size] -> the pairs' rows [T * K, N]; those of pairs routed nowhere are not written."""
    arguments = product.arguments(x, tile)
    num_pairs, (num_experts, columns, _) = ids.numel(), product.sizes
    p_x = arguments["p_x"]
    out = torch.empty(num_pairs, columns, dtype=p_x.dtype, device=p_x.device)
    tiles, shares, arrived = cdiv(columns, tile.columns), None, None
    splits = product.splits(tile)
    if splits > 1:
        assert len(ids) <= tile.rows, (len(ids), tile)
        height = columns * (2 if product.is_gated else 1)
        shares = torch.empty(splits, num_pairs, height, dtype=torch.float32, device=p_x.device)
        arrived = arrival_counters(p_x.device)
    room = next_power_of_2(num_pairs)
    by_pair = room < num_experts  # by the room for pairs: no kernel of its own for numbers in between
    arguments |= {
        "p_ids": ids, "p_out": out, "p_shares": shares, "p_arrived": arrived, "num_pairs": num_pairs, "DIV": per_row,
        "BY_PAIR": by_pair, "SPLITS": splits,
    }  # fmt: skip
    launch, ahead = chosen(SCANS.all_on(p_x.device), product, tile, p_x)
    launch((tiles, num_pairs if by_pair else num_experts, splits), room, ahead, tile, arguments)
    return out


def _scan_in_registers(
    grid: tuple[int, int, int], room: int, ahead: int, tile: GroupedTile, arguments: dict[str, Any]
) -> None:
    few = {name: value for name, value in arguments.items() if name not in NOT_IN_REGISTERS}
    few_product_kernel[grid](BPAIRS=max(32, room), AHEAD=ahead, **few, **register_limit(tile.registers))


def _scan(grid: tuple[int, int, int], room: int, ahead: int, tile: GroupedTile, arguments: dict[str, Any]) -> None:
    scan_product_kernel[grid](BPAIRS=room, **arguments)


def _not_ahead(product: Product, tile: GroupedTile, rows: torch.Tensor) -> int:
    return 0


# A kernel serves (product, tile, rows) by so many blocks ahead. (grid, room for pairs, ahead, tile, arguments)
Scan = Callable[[tuple[int, int, int], int, int, GroupedTile, dict[str, Any]], None]
SCANS: KernelTable[Kernel[[Product, GroupedTile, torch.Tensor], int, Scan]] = KernelTable(
    "products of few pairs",
    Candidate(Kernel(Product.ahead, _scan_in_registers), FROM_AMPERE),
    Candidate(Kernel(_not_ahead, _scan)),
)


def sorted_product(
    product: Product, x: Activations, pairs: SortedPairs, per_row: int, tile: GroupedTile, *,
    x_sorted: bool = False, out_sorted: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The same over sorted pairs; x_sorted, out_sorted: rows lie in the order of `pairs`, not that of the ids."""
    assert tile.rows == pairs.tile_rows, (tile, pairs.tile_rows)
    if tile.in_gluon:
        assert out_sorted == (product.activation is not None), "that kernel activates rows in the order of pairs only"
        return _wide_product(product, materialize(x), pairs, 0 if x_sorted else per_row)
    arguments = product.arguments(x, tile)
    p_x, columns = arguments["p_x"], product.sizes[1]
    out = torch.empty(pairs.order.shape[0], columns, dtype=p_x.dtype, device=p_x.device)
    most = pairs.tiles.shape[1] * cdiv(columns, tile.columns)
    programs = min(most, tile.programs * multiprocessors(p_x.device)) if tile.programs else most
    sorted_product_kernel[(programs,)](
        p_order=pairs.order, p_tiles=pairs.tiles, p_num_tiles=pairs.num_tiles, p_out=out,
        MOST_TILES=pairs.tiles.shape[1], DIV=per_row, X_SORTED=x_sorted, OUT_SORTED=out_sorted,
        SPLITS=1, **arguments,
    )  # fmt: skip
    return out


def _wide_product(product: Product, x: torch.Tensor, pairs: SortedPairs, per_row: int) -> torch.Tensor:
    """`gluon_wide`'s; x has a row for `per_row` pairs, or, 0, one for each in their order."""
    weight, glu = product.weight, product.activation or GLU()
    assert isinstance(weight, torch.Tensor)
    out = torch.empty(pairs.order.shape[0], product.sizes[1], dtype=x.dtype, device=x.device)
    wide_product(
        x, weight, pairs.tiles.shape[1], out,
        {
            "p_bias": product.bias, "p_weights": product.pair_weights, "p_order": pairs.order, "p_tiles": pairs.tiles,
            "p_num_tiles": pairs.num_tiles, "limit": glu.limit or 0.0, "alpha": glu.alpha, "up_offset": glu.up_offset,
            "DIV": per_row, "GATED": product.is_gated, "HAS_LIMIT": glu.limit is not None,
            **early_launch(x.device),
        },
    )  # fmt: skip
    return out
