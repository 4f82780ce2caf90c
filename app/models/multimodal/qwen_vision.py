"""The encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen 3.5: patches that rotate by row and column, merged four to
one token; windows (2.5); interpolated positions and features for the first layers of the language model (3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.tensors.names import Rule
from app.errors import CheckpointError
from app.kernels.attention.encoder import EncoderPlan, plan_encoder
from app.layers.context import BuildContext
from app.layers.layer import Layer
from app.layers.layer_norm import LayerNorm
from app.layers.norm import Norm, RMSNorm
from app.layers.replicated import ReplicatedTable
from app.layers.rope_scaling import RopeSettings
from app.models.decoder import Ropes
from app.models.multimodal.base import MediaEncoder, Picture
from app.models.multimodal.vision_config import CLIP_MEAN, CLIP_STD, HALF, Normalization, VisionConfig
from app.models.multimodal.vision_layers import (
    FusedAttention,
    GatedBlock,
    PatchEmbedding,
    PlainBlock,
    Span,
    VisionAttention,
    VisionBlock,
)
from app.records.media_info import MediaInfo
from app.records.sized_cache import SizedCache

EPS = 1e-6
COMMON = {"temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 16}
QWEN3 = {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304, "patch_size": 16}
# Kinds of models whose encoder another kind has.
_AS = {"qwen2_5_omni_thinker": "qwen2_5_vl", "qwen3_omni_moe_thinker": "qwen3_vl_moe"}
WITH_DEEP = ("qwen3_vl", "qwen3_vl_moe")
OLDER = {
    "qwen2_vl": {"hidden_act": "quick_gelu", "mlp_ratio": 4, "embed_dim": 1280, "depth": 32, "patch_size": 14},
    "qwen2_5_vl": {
        **{"hidden_act": "silu", "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "depth": 32},
        "patch_size": 14,
    },
}
TABLE_BYTES = 64 << 20  # of grids that came before
Grid = tuple[int, int, int]


class Neighbours(NamedTuple):
    """Four entries of a table for each patch, and how much of each it takes."""

    indices: torch.Tensor  # int64 [4, T]
    shares: torch.Tensor  # [4, T, 1]


@dataclass(slots=True, frozen=True)
class GridTables:
    """Says of a grid's patches, in the order in which blocks read them, what does not depend on pixels."""

    order: torch.Tensor | None  # int64 [T] the processor's number of each; None: the same order
    cos: torch.Tensor  # fp32 [T, 1, D]
    sin: torch.Tensor
    windows: list[int]  # patches of each window
    frames: list[int]  # patches of each frame
    neighbours: Neighbours | None  # of a frame's patches in the square of learned positions; None: there is none
    plans: tuple[EncoderPlan, EncoderPlan]  # of frames and of windows, where the picture comes alone

    @property
    def num_bytes(self) -> int:
        """Memory of the device."""
        tensors = (self.cos, self.sin, self.order, *(self.neighbours or ()))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class PatchMerger(Layer):
    """norm, then two products of the patches that become one token."""

    def __init__(self, ctx: BuildContext, norm: Norm, size: int, merged: int, out: int, *, norms_merged: bool) -> None:
        super().__init__()
        self.norm, self._merged, self._norms_merged = norm, merged, norms_merged
        self.mlp = PlainBlock(ctx, merged, merged, "gelu", out=out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T / patches a token, out]."""
        x = self.norm(x.view(-1, self._merged)) if self._norms_merged else self.norm(x).view(-1, self._merged)
        return self.mlp(x)  # type: ignore[no-any-return]


class GridVision(MediaEncoder):
    """Patches of a grid, those of one token side by side, which rotate by row and column; a constructor sets these.

    A video's frames are pictures of their own to attention.
    """

    size: int
    head_dim: int
    patch: int
    merge: int  # patches along each side of a token
    dtype: torch.dtype
    device: torch.device
    normalization: Normalization
    patch_embed: PatchEmbedding
    blocks: nn.ModuleList
    merger: nn.Module
    frames: int = 1  # of a patch
    window: int = 0  # tokens along its side; 0: none
    full_layers: frozenset[int] = frozenset()  # that see more than a window
    pos_embed: ReplicatedTable | None
    side: int = 0  # of the square of learned positions
    deep_layers: tuple[int, ...] = ()
    deep_mergers: nn.ModuleList
    later_bytes = TABLE_BYTES
    is_capturable = True

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = None
        self._tables: SizedCache[GridTables] = SizedCache(TABLE_BYTES)

    def num_tokens(self, grid: Grid) -> int:
        """See MediaEncoder."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def largest(self, num_tokens: int) -> Picture:
        """See MediaEncoder: as square as it can be."""
        rows = max(1, int(num_tokens**0.5))
        grid = (1, rows * self.merge, max(1, num_tokens // rows) * self.merge)
        shape = (grid[1] * grid[2], 3, self.patch, self.patch)
        return Picture(torch.zeros(shape, dtype=torch.uint8, device=self.device), grid)

    def forward(self, pictures: Sequence[Picture]) -> torch.Tensor:
        """See MediaEncoder."""
        tables = [self._table(picture.grid) for picture in pictures]
        x = joined([self._embed(*pair) for pair in zip(pictures, tables, strict=True)])
        cos, sin = (joined([getattr(table, name) for table in tables]) for name in ("cos", "sin"))
        alone = tables[0].plans if len(tables) == 1 else None
        plans = alone or self._plans([table.frames for table in tables], [table.windows for table in tables])
        frames, windows = (Span(plan, cos, sin) for plan in plans)
        deep: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.blocks):
            x = block(x, frames if layer in self.full_layers else windows)
            if layer in self.deep_layers:
                place = self.deep_layers.index(layer)
                deep[place] = self.deep_mergers[place](x)
        merged = [self._in_order(y, tables) for y in (self.tokens(x), *(deep[place] for place in sorted(deep)))]
        return torch.stack(merged)

    def constants(self, grid: Grid) -> object:
        """See MediaEncoder."""
        return self._table(grid)

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Patches [T, E] behind the blocks -> tokens [T / patches a token, C]."""
        return self.merger(x)  # type: ignore[no-any-return]

    def _embed(self, picture: Picture, table: GridTables) -> torch.Tensor:
        """Patches in the order of blocks, [T, E]; those of a still picture are repeated as frames."""
        pixels = self.normalization.apply(picture.pixels, 1, self.dtype)
        if pixels.ndim == 4:
            pixels = pixels.unsqueeze(2).expand(-1, -1, self.frames, -1, -1)
        x: torch.Tensor = self.patch_embed(pixels)
        if table.order is not None:
            x = x.index_select(0, table.order)
        placed = self.placed(table, picture.grid)
        return x if placed is None else x + placed.repeat(picture.grid[0], 1)

    def placed(self, table: GridTables, grid: Grid) -> torch.Tensor | None:
        """Learned positions of a frame's patches [T, E], in their order; None: there are none. Not kept: as large as
        the patches themselves."""
        if table.neighbours is None or self.pos_embed is None:
            return None
        found: torch.Tensor = (self.pos_embed(table.neighbours.indices) * table.neighbours.shares).sum(0)
        return found

    def _in_order(self, merged: torch.Tensor, tables: Sequence[GridTables]) -> torch.Tensor:
        """Tokens as the processor counts them."""
        if all(table.order is None for table in tables):
            return merged
        each, out, first = self.merge**2, torch.empty_like(merged), 0
        for table in tables:
            assert table.order is not None
            tokens = table.order[::each] // each
            out.index_copy_(0, tokens + first, merged[first : first + len(tokens)])
            first += len(tokens)
        return out

    def _table(self, grid: Grid) -> GridTables:
        key = repr(grid).encode()
        table = self._tables.find(key)
        if table is None:
            table = self._made(grid)
            self._tables.keep(key, table, table.num_bytes)
        return table

    def _made(self, grid: Grid) -> GridTables:
        num_frames, height, width = grid
        rows, columns = _merge_order(height, width, self.merge)
        frame = height * width
        order, windows = None, [frame] * num_frames
        if self.window:
            order, windows = self._windows(grid)
        inverse = 1.0 / 10_000.0 ** (torch.arange(0, self.head_dim // 2, 2, dtype=torch.float32) / (self.head_dim // 2))
        angles = torch.cat([torch.outer(places.float(), inverse) for places in (rows, columns)], dim=1)
        angles = angles.repeat(num_frames, 1)
        if order is not None:
            angles = angles[order]
        cos, sin = angles.cos(), angles.sin()
        frames = [frame] * num_frames
        return GridTables(
            None if order is None else order.to(self.device),
            torch.cat((cos, cos), 1).unsqueeze(1).to(self.device, self.dtype),
            torch.cat((-sin, sin), 1).unsqueeze(1).to(self.device, self.dtype),
            windows,
            frames,
            None if self.pos_embed is None else self._neighbours(height, width),
            self._plans([frames], [windows]),
        )

    def _plans(self, frames: Sequence[list[int]], windows: Sequence[list[int]]) -> tuple[EncoderPlan, EncoderPlan]:
        """Plans what patches see of each other, of pictures with these frames and windows."""
        whole = plan_encoder(_starts(frames), self.device)
        return whole, plan_encoder(_starts(windows), self.device) if self.window else whole

    def _windows(self, grid: Grid) -> tuple[torch.Tensor, list[int]]:
        """Patches window by window, and how many each has; what becomes one token stays together."""
        num_frames, height, width = (grid[0], grid[1] // self.merge, grid[2] // self.merge)
        tokens = torch.arange(height * width).view(height, width)
        side, each = self.window, self.merge**2
        cut = [
            tokens[top : top + side, left : left + side].flatten()
            for top in range(0, height, side)
            for left in range(0, width, side)
        ]
        chosen = torch.cat([part + frame * height * width for frame in range(num_frames) for part in cut])
        patches = (chosen[:, None] * each + torch.arange(each)).flatten()
        return patches, [len(part) * each for part in cut] * num_frames

    def _neighbours(self, height: int, width: int) -> Neighbours:
        """Finds what the learned square of positions, interpolated, gives each patch of a frame."""
        rows, columns = _merge_order(height, width, self.merge)
        (low_r, high_r, part_r), (low_c, high_c, part_c) = (
            _between(places, size, self.side) for places, size in ((rows, height), (columns, width))
        )
        indices = torch.stack([row * self.side + column for row in (low_r, high_r) for column in (low_c, high_c)])
        shares = torch.stack([r * c for r in (1 - part_r, part_r) for c in (1 - part_c, part_c)])
        return Neighbours(indices.to(self.device), shares.to(self.device, self.dtype).unsqueeze(2))


class QwenVision(GridVision):
    """Qwen's own; see the head of this file."""

    def __init__(self, ctx: BuildContext, info: ModelInfo) -> None:
        super().__init__()
        kind = _AS.get(str(info.hf_config["model_type"]), str(info.hf_config["model_type"]))
        v = VisionConfig(info, {**COMMON, **OLDER.get(kind, QWEN3)})
        is_second, is_windowed = kind == "qwen2_vl", kind == "qwen2_5_vl"
        size = v.whole("embed_dim", "hidden_size") if is_second else v.whole("hidden_size")
        depth, heads = v.whole("depth"), v.whole("num_heads")
        inner = int(size * v.number("mlp_ratio")) if is_second else v.whole("intermediate_size")
        out = v.whole("hidden_size") if is_second else v.whole("out_hidden_size")
        act = v.text("hidden_act")
        self.patch, self.frames = v.side("patch_size"), v.whole("temporal_patch_size")
        self.merge = v.whole("spatial_merge_size")
        self.window = v.whole("window_size") // self.merge // self.patch if is_windowed else 0
        self.full_layers = frozenset(v.layers("fullatt_block_indexes")) if is_windowed else frozenset(range(depth))
        self.deep_layers = v.layers("deepstack_visual_indexes") if kind in WITH_DEEP else ()
        self.num_deep = len(self.deep_layers)
        self.size, self.head_dim, self.dtype, self.device = size, heads_of(size, heads, info), ctx.dtype, ctx.device
        is_older = is_second or is_windowed
        self.normalization = Normalization.of(info, *((CLIP_MEAN, CLIP_STD) if is_older else (HALF, HALF)))
        self.patch_embed = PatchEmbedding(ctx, size, (3, self.frames, self.patch, self.patch), bias=not is_older)
        num_positions = 0 if is_older else v.whole("num_position_embeddings")
        self.pos_embed = ReplicatedTable(ctx, num_positions, size) if num_positions else None
        self.side = int(num_positions**0.5)

        def norm(width: int) -> Norm:
            return RMSNorm(ctx, width, EPS) if is_windowed else LayerNorm(ctx, width, EPS)

        def mlp() -> nn.Module:
            return GatedBlock(ctx, size, inner, act, bias=True) if is_windowed else PlainBlock(ctx, size, inner, act)

        self.blocks = nn.ModuleList(
            VisionBlock((norm(size), norm(size)), self.attention(ctx, size, heads), mlp()) for _ in range(depth)
        )
        merged = size * self.merge**2
        self.merger = PatchMerger(ctx, norm(size), size, merged, out, norms_merged=False)
        self.deep_mergers = nn.ModuleList(
            PatchMerger(ctx, norm(merged), size, merged, out, norms_merged=True) for _ in self.deep_layers
        )

    attention: ClassVar[type[FusedAttention | VisionAttention]] = FusedAttention
    rules: ClassVar[Sequence[Rule]] = (
        (r"^visual\.", ""),
        (r"^patch_embed\.proj\.", "patch_embed."),
        (r"\.linear_fc", ".fc"),
        (r"^(deepstack_)?merger_list\.", "deep_mergers."),
        (r"^(merger|deep_mergers\.\d+)\.ln_q\.", r"\1.norm."),
        (r"^(merger|deep_mergers\.\d+)\.mlp\.0\.", r"\1.mlp.fc1."),
        (r"^(merger|deep_mergers\.\d+)\.mlp\.2\.", r"\1.mlp.fc2."),
        (r"^(merger|deep_mergers\.\d+)\.fc", r"\1.mlp.fc"),
    )


class ApartVision(QwenVision):
    """The same with products of their own for queries, keys and values: Qwen2.5-Omni's."""

    attention = VisionAttention
    rules = (*QwenVision.rules, (r"\.attn\.([qkv])\.", r".attn.\1_proj."), (r"\.attn\.proj\.", ".attn.o_proj."))


def heads_of(size: int, num_heads: int, info: ModelInfo) -> int:
    """The width of a head; CheckpointError where they do not share the size, or none turns by rows and columns."""
    if size % num_heads or size // num_heads % 4:
        raise CheckpointError(f"{info.directory}: vision_config: {num_heads} heads of {size}", param="model")
    return size // num_heads


def with_sections(info: ModelInfo, ropes: Ropes, sections: tuple[int, ...]) -> Ropes:
    """The same with coordinates in sections, a family's where config.json says none, of a model that sees."""

    def of(layer_type: str) -> RopeSettings:
        settings = ropes(layer_type)
        given = {"mrope_section": list(sections), **settings.parameters}
        return settings if MediaInfo.of(info) is None else replace(settings, parameters=given)

    return of


def _merge_order(height: int, width: int, merge: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each patch of a frame, those of one token side by side."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return in_merge_order(rows, merge), in_merge_order(columns, merge)


def in_merge_order(frame: torch.Tensor, merge: int) -> torch.Tensor:
    """Returns what a frame's patches have, [rows, columns, ...] -> [T, ...], those of one token side by side."""
    height, width, *rest = frame.shape
    cut = frame.reshape(height // merge, merge, width // merge, merge, *rest)
    return cut.transpose(1, 2).flatten(0, 3)


def _between(places: torch.Tensor, size: int, side: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Neighbours in a table of `side` entries, and how far towards the second; corners fall on corners."""
    exact = places.float() * (side - 1) / max(size - 1, 1)
    low = exact.floor()
    return low.long(), (low.long() + 1).clamp(max=side - 1), exact - low


def stretched(positions: torch.Tensor, grid: Grid, merge: int) -> torch.Tensor:
    """Learned positions [rows, columns, E] as a picture would be resized to a grid, in the order of its patches."""
    resized = F.interpolate(positions.permute(2, 0, 1)[None], grid[1:], mode="bicubic")[0]
    return in_merge_order(resized.permute(1, 2, 0), merge)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other; a single one as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _starts(lengths: Sequence[list[int]]) -> list[int]:
    """Finds where each span of all pictures begins, and where the last ends."""
    starts = [0]
    for length in (one for own in lengths for one in own):
        starts.append(starts[-1] + length)
    return starts
