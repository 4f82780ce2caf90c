"""Positions by frame, row and column are transformers'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.records.media import MediaAsk, MediaItem
from app.records.media_info import MediaInfo
from app.worker.media.shown_prompt import PositionRule, rope_positions, shown_items
from tests.tiny_media import IMAGE, media_judge, tiny_media_model

VIDEO = 301
ITEM = MediaItem("image", b"d" * 16, 0, 0, (1, 1, 1), (), b"")


def laid_out(parts: list[Any]) -> tuple[list[int], MediaAsk]:
    """Text as numbers of tokens, items as (kind, grid, seconds, tokens between frames)."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [5] * part
            continue
        kind, grid, seconds, between = part
        frame = grid[1] * grid[2] // 4
        own = [IMAGE if kind == "image" else VIDEO] * frame
        runs = ((own + [6] * between) * grid[0])[: (frame + between) * grid[0] - between]
        item = replace(ITEM, kind=kind, offset=len(tokens), length=len(runs), grid=grid, seconds_per_frame=seconds)
        items.append(item)
        tokens += runs
    return tokens, MediaAsk(tuple(items))


@pytest.mark.parametrize(
    ("name", "rate", "parts"),
    [
        ("qwen2_vl", 0.0, [2, ("image", (1, 4, 6), 0.0, 0), 3]),
        ("qwen2_vl", 0.0, [("image", (1, 2, 8), 0.0, 0), 1, ("video", (3, 4, 2), 0.0, 0), 2]),
        ("qwen2_5_vl", 4.0, [3, ("video", (3, 4, 2), 2.6, 0), 1, ("image", (1, 6, 2), 0.0, 0)]),
        ("qwen3_vl", 0.0, [1, ("video", (3, 4, 6), 0.0, 2), 4, ("image", (1, 6, 2), 0.0, 0), 1]),
    ],
)
def test_positions_are_those_of_transformers(name: str, rate: float, parts: list[Any]) -> None:
    tokens, ask = laid_out(parts)
    ids = torch.tensor([tokens])
    grids: dict[str, Any] = {f"{kind}_grid_thw": None for kind in ("image", "video")}
    for kind in ("image", "video"):
        if own := [item.grid for item in ask.items if item.kind == kind]:
            grids[f"{kind}_grid_thw"] = torch.tensor(own)
    seconds = torch.tensor([item.seconds_per_frame for item in ask.items if item.kind == "video"])
    if rate:
        grids["second_per_grid_ts"] = seconds
    judge: Any = media_judge(tiny_media_model(name)).model
    types = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    expected, delta = judge.get_rope_index(ids, mm_token_type_ids=types, **grids)
    items = shown_items(np.array(tokens, np.int32), ask, MediaInfo("qwen_vl", IMAGE, VIDEO, 2))
    positions, own_delta = rope_positions(items, len(tokens), PositionRule(2, rate))
    assert positions.T.tolist() == expected[:, 0].tolist()
    assert own_delta == int(delta)
