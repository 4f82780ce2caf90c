"""The ends of steps with drafts, against loops: PyTorch, and Triton (interpreter, or a GPU)."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from app.kernels.drafts import (
    ACCEPT_DRAFTS,
    CONTINUE_NGRAMS,
    PLACE_DRAFTS,
    REPEAT_PARAMETERS,
    WRITE_DRAFTS,
    LogitsPlaces,
    reference,
    triton_ngram,
    triton_ops,
)
from app.kernels.rows import RowColumns, StepTensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PATHS = [pytest.param(reference, id="torch"), pytest.param(triton_ops, id="triton")]
NGRAMS = [pytest.param(reference, id="torch"), pytest.param(triton_ngram, id="triton")]
ROWS, WIDTH, VOCAB, SIZE, GROUPS = 8, 40, 3, 4, 2  # few tokens, so that drafts are right by chance


def int32(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def int64(values: object) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64, device=DEVICE)


def columns(rng: np.random.Generator) -> RowColumns:
    """Counts as a step leaves them that has not verified yet: `num_tokens` is one more than `num_computed`."""
    known = rng.integers(6, WIDTH - 5, ROWS)
    table = rng.permutation(GROUPS * ROWS * WIDTH // SIZE).reshape(GROUPS * ROWS, -1)
    ids = rng.integers(0, VOCAB, ROWS * WIDTH + 2)
    blocks = int64(-(-known // SIZE) + rng.integers(0, 2, ROWS))
    return RowColumns(int32(known - 1), int32(known), int32(ids), int32(table), WIDTH, SIZE, blocks)


@pytest.mark.parametrize("ops", PATHS)
def test_drafts_are_kept_up_to_the_first_that_differs(ops: ModuleType) -> None:
    """With rows that only pad, one place of whose own is written, and ids of no token."""
    rng, seen = np.random.default_rng(0), set()
    for _ in range(60):
        c = columns(rng)
        ids, known, computed = (x.tolist() for x in (c.flat_token_ids, c.num_tokens, c.num_computed))
        rows = [*rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist(), -1, -1]
        drafts = [*rng.integers(0, 4, len(rows) - 2).tolist(), 0, 0]
        firsts = [known[row] - 1 - d for row, d in zip(rows, drafts, strict=True)]
        targets = [
            row * WIDTH + first + j if row >= 0 else ROWS * WIDTH + 1
            for row, first, d in zip(rows, firsts, drafts, strict=True)
            for j in range(d + 1)
        ]
        drawn = rng.integers(0, VOCAB, len(targets)).tolist()
        counts = np.array(drafts) + 1
        begins = np.cumsum(counts) - counts
        given = [1 << 40 if token == VOCAB - 1 else token for token in drawn]
        sent = int32([0, *rows])[1:]  # a view that is not aligned
        num_new, last = ops.accept_drafts(
            c, sent, LogitsPlaces(int32(begins), int32(counts)), int64(targets), int64(given), VOCAB
        )
        for i, (row, d) in enumerate(zip(rows[:-2], drafts, strict=False)):
            mine, at = drawn[begins[i] : begins[i] + d + 1], row * WIDTH + firsts[i]
            accepted = next((j for j in range(d) if mine[j] != ids[at + j]), d)
            assert (int(num_new[i]), int(last[i])) == (accepted + 1, begins[i] + accepted)
            assert c.flat_token_ids[at : at + d + 1].tolist() == mine
            known[row], computed[row] = known[row] - d + accepted, computed[row] - d + accepted
            seen.add((d, accepted))
        assert num_new[-2:].tolist() == [1, 1]
        assert (c.num_tokens.tolist(), c.num_computed.tolist()) == (known, computed)
    assert seen == {(d, accepted) for d in range(4) for accepted in range(d + 1)}


@pytest.mark.parametrize("ops", PATHS)
def test_rows_without_drafts_get_their_token(ops: ModuleType) -> None:
    c = columns(np.random.default_rng(1))
    known = c.num_tokens.clone()
    targets = int64([4 * WIDTH + 7, 2 * WIDTH + 9, ROWS * WIDTH + 1])
    num_new, last = ops.accept_drafts(c, int32([4, 2, -1]), None, targets, int64([2, 1, 0]), VOCAB)
    assert (num_new.tolist(), last.tolist()) == ([1, 1, 1], [0, 1, 2])
    assert c.flat_token_ids[targets[:2]].tolist() == [2, 1]
    assert torch.equal(c.num_tokens, known)


@pytest.mark.parametrize("ops", PATHS)
def test_drafts_stand_behind_the_known_tokens_and_never_past_a_row(ops: ModuleType) -> None:
    c = columns(np.random.default_rng(2))
    c.num_tokens[3] = WIDTH - 1
    before, at = c.flat_token_ids.tolist(), int(c.num_tokens[5])
    ops.write_drafts(c, int32([3, -1, 5]), int64([[50, 51, 52], [60, 61, 62], [70, 71, 72]]))
    wanted = list(before)
    wanted[3 * WIDTH + WIDTH - 1] = 50
    wanted[5 * WIDTH + at : 5 * WIDTH + at + 3] = [70, 71, 72]
    assert c.flat_token_ids.tolist()[: ROWS * WIDTH] == wanted[: ROWS * WIDTH]


@pytest.mark.parametrize("ops", PATHS)
@pytest.mark.parametrize(("ahead", "each", "sees_block"), [(1, 1, False), (3, 1, False), (1, 5, False), (1, 5, True)])
def test_tokens_ahead_have_slots_where_there_are_blocks(
    ops: ModuleType, ahead: int, each: int, sees_block: bool
) -> None:
    c = columns(np.random.default_rng(3))
    assert c.num_blocks is not None
    step = StepTensors.zeros(6, 6, DEVICE)
    step.positions.copy_(int64([0, 11, 36, 20, 5, 38]))
    step.slots.copy_(int64([3, 5, 8, -1, 2, 9]))
    rows, ends = [4, 0, 7, 2, 1], [1, 2, 3, 4, 5]
    found = ops.place_drafts(c, int64(rows), step, int64(ends), ahead, each, sees_block=sees_block)
    table, blocks = c.block_table.tolist(), c.num_blocks.tolist()
    begins = [int(step.positions[end]) + ahead for end in ends]
    places = [(i, begin + j) for i, begin in enumerate(begins) for j in range(each)]
    assert found.positions.tolist() == [position for _, position in places]
    assert found.seq_lens.tolist() == [begins[i] + each if sees_block else position + 1 for i, position in places]
    for group in range(GROUPS):
        assert found.slots[group].tolist() == [
            table[group * ROWS + rows[i]][position // SIZE] * SIZE + position % SIZE
            if position // SIZE < blocks[rows[i]] and int(step.slots[ends[i]]) >= 0 and position < WIDTH
            else -1
            for i, position in places
        ]


@pytest.mark.parametrize("ops", NGRAMS)
@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 8), (5, 5)])
def test_n_grams_go_on_as_they_did_last(ops: ModuleType, shortest: int, longest: int) -> None:
    rng, count = np.random.default_rng(longest), 5
    c = columns(rng)
    c.num_tokens[0], c.num_tokens[1] = 1, 2
    rows = rng.permutation(ROWS).tolist()
    found = ops.continue_ngrams(c, int64(rows), shortest, longest, count)
    for row, own in zip(rows, found.tolist(), strict=True):
        text = c.flat_token_ids[row * WIDTH :][: int(c.num_tokens[row])].tolist()
        assert own == continued(text, shortest, longest, count)


def followed(text: list[int], shortest: int, longest: int) -> int:
    """Where what followed the longest and latest match begins."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for place in range(len(text) - 1, length - 1, -1):
            if text[place - length : place] == text[-length:]:
                return place
    return len(text) - 1


def continued(text: list[int], shortest: int, longest: int, count: int) -> list[int]:
    first = followed(text, shortest, longest)
    known = list(text)
    for ahead in range(count):
        known.append(known[first + ahead])
    return known[len(text) :]


@pytest.mark.parametrize("ops", NGRAMS)
def test_n_grams_of_long_rows(ops: ModuleType) -> None:
    """More than a program's tile; a match that begins in one tile and ends in another."""
    width, rng = 3000, np.random.default_rng(9)
    ids = rng.integers(10, 10_000, 2 * width + 2)
    ids[1020:1029] = ids[width - 9 : width] = np.arange(9)
    ids[1029:1032] = [7_001, 7_002, 7_003]
    zeros = int32(np.zeros((2, 1)))
    c = RowColumns(zeros[:, 0], int32([width, 2999]), int32(ids), zeros, width, 16)
    found = ops.continue_ngrams(c, int64([0, 1]), 2, 6, 3).tolist()
    assert found == [[7_001, 7_002, 7_003], [int(ids[width + 2998])] * 3]


@pytest.mark.parametrize("ops", PATHS)
def test_each_place_of_a_row_draws_by_its_parameters(ops: ModuleType) -> None:
    floats = torch.rand(3, 4, device=DEVICE)
    keys = int64([[1, 2], [3, 4], [5, 6]])
    given = (floats[:, 0].contiguous(), int32([7, 8, 9]), floats[:, 1].contiguous(), floats[:, 2].contiguous(), keys)
    for mine, one in zip(ops.repeat_parameters(given, 3), given, strict=True):
        assert mine.tolist() == [each for each in one.tolist() for _ in range(3)]


def test_the_device_chooses_the_path() -> None:
    kernels = (triton_ops, triton_ngram) if DEVICE.type == "cuda" else (reference, reference)
    assert ACCEPT_DRAFTS.on(DEVICE) is kernels[0].accept_drafts
    assert WRITE_DRAFTS.on(DEVICE) is kernels[0].write_drafts
    assert PLACE_DRAFTS.on(DEVICE) is kernels[0].place_drafts
    assert REPEAT_PARAMETERS.on(DEVICE) is kernels[0].repeat_parameters
    assert CONTINUE_NGRAMS.on(DEVICE) is kernels[1].continue_ngrams
