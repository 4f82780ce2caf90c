"""When shared prefixes are worth reading once, against a count over whole tables."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from app.config.engine import EngineConfig
from app.errors import ConfigError
from app.layers.cache_spec import LayerCacheSpec
from app.worker.cascade_choice import CascadeChoice, refuse_cascade, select_cascade
from app.worker.graphs.cuda_graphs import cascade_sizes, graph_sizes
from app.worker.rows.row_state import RowState

BLOCK = 16


def state_of(lengths: list[int], shared: list[tuple[int, int]], longest: int = 4096) -> RowState:
    """Rows of `lengths` tokens; `shared[r] = (other, blocks)` of an earlier row."""
    state = RowState(len(lengths), longest, BLOCK, torch.device("cpu"))
    blocks = iter(np.random.default_rng(0).permutation(1 << 15).tolist())
    for row, (length, (other, count)) in enumerate(zip(lengths, shared, strict=True)):
        num_blocks = -(-length // BLOCK)
        state.host_block_table[row, :num_blocks] = [next(blocks) for _ in range(num_blocks)]
        state.host_block_table[row, :count] = state.host_block_table[other, :count]
        state.num_computed_tokens[row] = length - 1
        state.num_blocks[row] = num_blocks
    return state


def repeated_positions(state: RowState, rows: list[int]) -> int:
    """Positions in whole blocks that another row reads too, less once each."""
    seen = [set(state.host_block_table[row, : state.num_computed_tokens[row] // BLOCK].tolist()) for row in rows]
    return BLOCK * (sum(map(len, seen)) - len(set().union(*seen)))


def test_never_more_than_there_is_and_at_least_half_of_long_prefixes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = rng.integers(1, 4000, 24).tolist()
        shared = [(int(rng.integers(0, max(1, row))), int(rng.integers(0, 220))) for row in range(24)]
        shared = [(o, min(n, lengths[row] // BLOCK, lengths[o] // BLOCK)) for row, (o, n) in enumerate(shared)]
        state = state_of(lengths, shared)
        rows = rng.permutation(24)[:17]
        found = CascadeChoice(state, 1).saved_positions(rows)
        truth = repeated_positions(state, rows.tolist())
        assert truth / 2 - 17 * 256 <= found <= truth


def test_exact_at_powers_of_two() -> None:
    state = state_of([3000, 2500, 2100, 600, 10], [(0, 0), (0, 128), (1, 128), (0, 32), (0, 0)])
    choice = CascadeChoice(state, 2 * 2048 + 512)
    rows = np.arange(5)
    assert choice.saved_positions(rows) == 2 * 2048 + 512
    assert choice.wanted(rows)
    assert not choice.wanted(rows[1:])
    assert not CascadeChoice(state, 2 * 2048 + 513).wanted(rows)
    assert not choice.wanted(rows[:1])


def test_the_answer_is_kept_until_other_requests_come() -> None:
    state = state_of([600, 600], [(0, 0), (0, 32)])
    choice, rows = CascadeChoice(state, 512), np.array([0, 1])
    assert choice.wanted(rows)
    state.host_block_table[1] += 10_000
    assert choice.wanted(np.array([0, 1])), "the same rows with the same requests share what they shared"
    state.num_entered += 1
    assert not choice.wanted(rows)


def test_contexts_too_short_to_share_and_forced() -> None:
    state = state_of([40, 40], [(0, 0), (0, 2)], longest=100)
    rows = np.array([0, 1])
    assert CascadeChoice(state, 1).saved_positions(rows) == 0
    assert not CascadeChoice(state, 1).wanted(rows)
    assert CascadeChoice(state, None).wanted(rows)
    assert not CascadeChoice(state, None).wanted(rows[:1])


def test_few_sizes_are_captured_twice() -> None:
    assert cascade_sizes([1]) == []
    assert cascade_sizes([1, 2, 4]) == [4]
    assert cascade_sizes([1, 2, 4, 8, 16, 24, 32, 40, 48]) == [8, 16, 32, 48]


class _Layer:
    shares_prefixes = True

    def __init__(self, sliding_window: int | None, dtype: torch.dtype = torch.bfloat16) -> None:
        self._spec = LayerCacheSpec((2, 8), 128, dtype, sliding_window)

    def cache_spec(self) -> LayerCacheSpec:
        return self._spec


def _selected(config: EngineConfig, windows: list[int | None], kv_dtype: torch.dtype = torch.bfloat16) -> Any:
    state = state_of([600, 600], [(0, 0), (0, 0)])
    return select_cascade(config, state, cast(Any, [_Layer(window, kv_dtype) for window in windows]), torch.bfloat16)


def test_a_stage_whose_layers_all_have_windows_goes_without() -> None:
    on, staged = EngineConfig(cascade_attention="on"), EngineConfig(cascade_attention="on", pipeline_parallel_size=2)
    assert _selected(on, [None, 64]) is not None
    assert _selected(staged, [None, 64]) is not None
    assert _selected(staged, [64, 64]) is None
    with pytest.raises(ConfigError, match="every layer of the model has a sliding window"):
        _selected(on, [64, 64])


def test_half_the_bytes_take_twice_the_positions() -> None:
    notes = [_selected(EngineConfig(), [None], kv_dtype).note for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    assert "10240 positions" in notes[0]
    assert "20480 positions" in notes[1]


def test_auto_leaves_fp32_alone() -> None:
    state = state_of([600, 600], [(0, 0), (0, 0)])
    layers = cast(Any, [_Layer(None)])
    assert select_cascade(EngineConfig(), state, layers, torch.float32) is None
    asked = EngineConfig(cascade_attention="on")
    assert select_cascade(asked, state, layers, torch.float32) is not None


def test_a_pooling_model_refuses_it_by_name() -> None:
    refuse_cascade(EngineConfig())
    with pytest.raises(ConfigError, match="a pooling model has no decodes"):
        refuse_cascade(EngineConfig(cascade_attention="on"))


def test_padding_of_a_step_that_shares_stays_small() -> None:
    sizes = graph_sizes(EngineConfig(max_num_seqs=1024, max_num_batched_tokens=2048))
    shared = cascade_sizes(sizes)
    assert set(shared) <= set(sizes)
    for rows in range(8, 512):
        assert next(size for size in shared if size >= rows) < rows + 32
    assert len(shared) < len(sizes) / 2
