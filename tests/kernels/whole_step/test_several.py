"""Whole steps of several rows in one launch (Gluon): what the kernel means, on a CPU; and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from app.kernels.whole_step import StepShape, StepToken, persistent, several
from app.kernels.whole_step.forms import BF16, INT8
from app.kernels.whole_step.gluon_rows_step import rows_step_kernel
from app.kernels.whole_step.persistent import PersistentStep, StepTile
from app.kernels.whole_step.reference import whole_step
from app.kernels.whole_step.several import RowsTile, tile_of_rows
from tests.kernels.gluon_on_cpu import OnCpu
from tests.kernels.whole_step.test_persistent import (
    BLOCK,
    BLOCKS,
    CPU,
    EXPERTS,
    LLAMA,
    ON_HOPPER,
    QWEN,
    REPLAYS,
    assert_near,
    layers_of,
    token_at,
)

SMALL = StepShape(1024, 8, 2, 128, 1024, 1e-6, 128**-0.5, norms_heads=True)
ONE_ROW = {BF16: StepTile(16, 8, 3, 1, 1, (1, 4))}


def tokens_at(positions: Sequence[int | None], shape: StepShape, device: torch.device = CPU) -> StepToken:
    """Of rows that have no block in common; None: a row that pads the step."""
    each = BLOCKS // len(positions)
    parts = [token_at(position or 0, shape, device) for position in positions]
    blocks = parts[0].blocks.view(-1)[: each * len(positions)].view(-1, each)
    slots = [
        -1 if p is None else int(own[p // BLOCK]) * BLOCK + p % BLOCK for own, p in zip(blocks, positions, strict=True)
    ]
    lens = [0 if p is None else p + 1 for p in positions]
    cos, sin = (torch.cat([getattr(part, name) for part in parts]) for name in ("cos", "sin"))
    ints = torch.tensor(lens, dtype=torch.int32, device=device)
    return StepToken(cos, sin, torch.tensor(slots, device=device), ints, blocks.contiguous())


def test_tiles() -> None:
    assert [tile_of_rows(QWEN, rows, 128) for rows in (2, 4, 8)] == [
        RowsTile(3072, 12, 16), RowsTile(3072, 12, 16), RowsTile(3072, 10, 16)
    ]  # fmt: skip
    assert tile_of_rows(replace(QWEN, intermediate=6144), 8, 128) == RowsTile(3072, 10, 16)  # half of it at once
    assert tile_of_rows(LLAMA, 2, 128) is None  # launches are as quick
    assert tile_of_rows(EXPERTS, 2, 128) is None
    assert tile_of_rows(replace(QWEN, intermediate=3072 + 128), 2, 128) is None
    assert tile_of_rows(replace(QWEN, kv_heads=16), 16, 128) is None  # more of them than programs
    assert tile_of_rows(replace(QWEN, heads=32), 8, 128) is None  # no place for the vectors


@pytest.mark.parametrize(
    ("shape", "programs", "positions", "num_layers"),
    [
        (SMALL, 8, (32, 5), 2),
        (SMALL, 8, (17, 0, None, 40), 1),
        (replace(SMALL, norms_heads=False, kv_heads=1, intermediate=2048), 4, (90, 70), 1),
        (replace(SMALL, kv_heads=1), 8, (740, 3, None, 20), 1),  # parts by length: one row has five
    ],
)
def test_meaning(
    shape: StepShape,
    programs: int,
    positions: Sequence[int | None],
    num_layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice over: counters are zero behind a step. The last one's vectors have no place at once."""
    monkeypatch.setattr(several, "rows_step_kernel", OnCpu(rows_step_kernel, all_at_once=True))
    rows, longest = len(positions), max(position or 0 for position in positions)
    for name in ("test_persistent", "test_several"):
        monkeypatch.setattr(f"tests.kernels.whole_step.{name}.BLOCKS", max(BLOCKS, rows * (longest // BLOCK + 1)))
    tile = RowsTile(1024, 3, programs // shape.kv_heads)
    step, token = PersistentStep(shape, ONE_ROW, CPU, programs, {rows: tile}), tokens_at(positions, shape)
    assert [step.longest_with(layers_of(shape, 1)[0].qkv, count) for count in (1, rows, 3)][1:] == [several.LONGEST, 0]
    x = torch.randn(rows, shape.hidden, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, layers = layers_of(shape, num_layers), layers_of(shape, num_layers)
    expected = whole_step(x, exact, replace(token, seq_len=token.seq_len.clamp(min=1)), shape)
    for _ in range(2):
        found = step.run(x.clone(), layers, token)
        assert found is not None
        for row, truth, position in zip(found, expected, positions, strict=True):
            if position is not None:
                assert_near(row, truth)
        for one, truth_of in zip(layers, exact, strict=True):
            assert_near(one.cache, truth_of.cache)


def test_what_is_not_served() -> None:
    step, layers = PersistentStep(SMALL, ONE_ROW, CPU, 8, {2: RowsTile(1024, 3, 4)}), layers_of(SMALL, 1)
    token = tokens_at((1, 2, 3), SMALL)
    assert step.run(torch.zeros(3, SMALL.hidden, dtype=torch.bfloat16), layers, token) is None
    stored = layers_of(SMALL, 1, form=INT8)[0].qkv
    assert step.longest_with(stored, 2) == 0
    assert PersistentStep(SMALL, ONE_ROW, CPU, 8).longest_with(layers[0].qkv, 2) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_on_a_gpu(rows: int) -> None:
    """As its definition; the same to the bit every time, from a graph, too; whatever ran before."""
    shape, device = QWEN, torch.device("cuda", 0)
    made, layers = persistent.make(shape, device), layers_of(shape, 2, device)
    assert made is not None
    full = [47, 0, 16, 15, 1, 33, 46, 8]
    for positions in (full[:rows], [*full[: rows - 1], None], [*range(30, 30 + rows)]):
        token = tokens_at(positions, shape, device)
        live = [row for row, position in enumerate(positions) if position is not None]
        x = torch.randn(rows, shape.hidden, device=device).to(torch.bfloat16)
        exact = [replace(layer, cache=layer.cache.clone()) for layer in layers]
        expected = whole_step(x, exact, replace(token, seq_len=token.seq_len.clamp(min=1)), shape)
        given = x.clone()
        found = made.run(given, layers, token)
        assert found is not None
        for row in live:
            assert_near(found[row], expected[row])
        for one, truth in zip(layers, exact, strict=True):
            assert_near(one.cache, truth.cache)
        first, graph = found.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made.run(given, layers, token)
        for _ in range(REPLAYS):
            given.copy_(x)
            graph.replay()
            assert torch.equal(given, first)
