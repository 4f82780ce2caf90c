"""Flat inputs against the loop that says what they mean, over random step messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.records.step import NewRequest, SchedulerOutput
from app.worker.rows.input_batch import build_input_batch
from app.worker.rows.row_state import RowState

ROWS, LENGTH, SIZE = 12, 100, 8


def random_state(rng: np.random.Generator) -> tuple[RowState, dict[int, list[int]], dict[int, list[int]]]:
    state = RowState(ROWS, LENGTH, SIZE, torch.device("cpu"))
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    requests = []
    free = rng.permutation(1000).tolist()
    for row in rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist():
        tokens[row] = rng.integers(0, 500, rng.integers(1, LENGTH)).tolist()
        blocks[row] = [free.pop() for _ in range(-(-len(tokens[row]) // SIZE))]
        ids = np.array(tokens[row], dtype=np.int32)
        computed = int(rng.integers(0, len(tokens[row])))
        kept = blocks[row][: rng.integers(0, len(blocks[row]) + 1)]
        requests.append(
            NewRequest(row, ids, len(ids), computed, kept, EngineRequest("r", [], SamplingParams(seed=0)), ())
        )
    nothing = np.zeros(0, dtype=np.int32)
    new_blocks = [(r.row, blocks[r.row][len(r.block_ids) :]) for r in requests]
    state.apply(SchedulerOutput(0, nothing, nothing, nothing.astype(bool), requests, new_blocks))
    return state, tokens, blocks


def test_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        state, tokens, blocks = random_state(rng)
        rows = np.array(list(tokens), dtype=np.int32)
        left = np.array([len(tokens[row]) - state.num_computed_tokens[row] for row in rows])
        counts = np.where(rng.random(len(rows)) < 0.5, left, rng.integers(1, left + 1)).astype(np.int32)
        order = np.argsort(counts != 1, kind="stable")  # decodes come first
        rows, counts, left = rows[order], counts[order], left[order]
        message = SchedulerOutput(1, rows, counts, counts == left)
        batch = build_input_batch(message, state)
        meta = batch.attention
        t = 0
        sampling = []
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            assert meta.query_start_loc[i] == t
            computed = int(state.num_computed_tokens[row])
            for position in range(computed, computed + count):
                assert batch.input_ids[t] == tokens[row][position]
                assert batch.positions[t] == position
                assert meta.slot_mapping[t] == blocks[row][position // SIZE] * SIZE + position % SIZE
                t += 1
            assert meta.seq_lens[i] == computed + count
            used = -(-(computed + count) // SIZE)
            assert meta.block_table[i, :used].tolist() == blocks[row][:used]
            if computed + count == len(tokens[row]):
                sampling.append((row, t - 1, len(tokens[row])))
        assert meta.query_start_loc[-1] == t == len(batch.input_ids)
        found = zip(batch.sampled.rows, batch.logits_indices.tolist(), batch.sampled.lengths, strict=True)
        assert list(found) == sampling
        assert batch.device_lengths.tolist() == batch.sampled.lengths.tolist()
        assert batch.targets.tolist() == [row * LENGTH + length for row, _, length in sampling]
        assert meta.num_decodes == next((i for i, count in enumerate(counts) if count > 1), len(counts))
        assert (meta.max_query_len, meta.max_seq_len) == (counts.max(), meta.seq_lens.max())
        dtypes = [meta.query_start_loc, meta.seq_lens, meta.block_table], [meta.slot_mapping, batch.positions]
        assert {tensor.dtype for tensor in dtypes[0]} == {torch.int32}
        assert {tensor.dtype for tensor in dtypes[1]} == {torch.int64}
        state.advance(message)
        for row, samples in zip(rows, counts == left, strict=True):
            assert state.num_tokens[row] == len(tokens[row]) + samples
        assert state.columns.num_tokens.tolist() == state.num_tokens.tolist()
        assert state.columns.num_computed.tolist() == state.num_computed_tokens.tolist()


def test_drafts_have_logits_of_their_own() -> None:
    """Row 4 verifies two drafts, row 1 is in the midst of its prompt, row 3 ends its own, row 2 verifies one draft."""
    state = RowState(ROWS, LENGTH, SIZE, torch.device("cpu"))
    known, computed = {4: 10, 1: 30, 3: 7, 2: 20}, {4: 9, 1: 4, 3: 2, 2: 19}
    spec = EngineRequest("r", [], SamplingParams(seed=0))
    requests = [
        NewRequest(row, np.full(n, row, np.int32), n, computed[row], [5 * row, 5 * row + 1, 5 * row + 2], spec, ())
        for row, n in known.items()
    ]
    rows, counts = np.array(list(known), np.int32), np.array([3, 6, 5, 2], np.int32)
    samples, drafts = np.array([True, False, True, True]), np.array([2, 0, 0, 1], np.int32)
    step = SchedulerOutput(1, rows, counts, samples, requests, num_draft_tokens=drafts)
    state.apply(step)
    batch = build_input_batch(step, state)
    assert batch.sampled.rows.tolist() == [4, 3, 2]
    assert batch.sampled.logits_rows.tolist() == [4, 4, 4, 3, 2, 2]
    assert batch.logits_indices.tolist() == batch.sampled.indices.tolist() == [0, 1, 2, 13, 14, 15]
    assert batch.device_lengths.tolist() == batch.sampled.lengths.tolist() == [10, 11, 12, 7, 20, 21]
    state.advance(step)
    for row, tokens in {4: 13, 1: 30, 3: 8, 2: 22}.items():
        assert state.num_tokens[row] == state.columns.num_tokens[row] == tokens
    state.apply(SchedulerOutput(2, rows[:0], counts[:0], samples[:0], rejected_drafts=[(4, 2)]))
    assert (state.num_tokens[4], state.num_computed_tokens[4]) == (11, 10)


def test_a_message_that_breaks_the_rules_is_noticed() -> None:
    state, _, _ = random_state(np.random.default_rng(3))
    row = int(np.flatnonzero(state.num_tokens - state.num_computed_tokens > 2)[0])
    rows, one = np.array([row], np.int32), np.array([1], np.int32)
    for counts, samples, drafts, complaint in (
        (one * 0, False, None, "brings no token"), (one, True, None, "exactly at the end"),
        (one * LENGTH, True, None, "lacks blocks"), (one, True, one, "exactly at the end"),
    ):  # fmt: skip
        step = SchedulerOutput(1, rows, counts, np.array([samples]), num_draft_tokens=drafts)
        with pytest.raises(AssertionError, match=complaint):
            build_input_batch(step, state)


def test_advance_counts_one_counter() -> None:
    """I1: after a step message, num_computed_tokens has moved by what was scheduled, for prefill and decode alike."""
    rng = np.random.default_rng(1)
    state, tokens, _ = random_state(rng)
    rows = np.array(list(tokens), dtype=np.int32)
    before = state.num_computed_tokens[rows].copy()
    counts = np.ones(len(rows), dtype=np.int32)
    samples = before + 1 == state.num_tokens[rows]
    state.advance(SchedulerOutput(1, rows, counts, samples))
    assert (state.num_computed_tokens[rows] == before + 1).all()
