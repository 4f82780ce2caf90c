"""Where logits lie; and that another pipeline stage comes to the same rows."""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.drafts.reference import write_drafts
from app.kernels.rows import RowColumns
from app.worker.spec_decode.feedback import pack, unpack, width_of
from app.worker.spec_decode.verify import places_of

ROWS, WIDTH, VOCAB = 8, 40, 3  # few tokens, so that drafts are right by chance
CPU = torch.device("cpu")


def columns(rng: np.random.Generator) -> RowColumns:
    """Counts as a step leaves them that has not verified yet: `num_tokens` is one more than `num_computed`."""
    known = torch.from_numpy(rng.integers(6, WIDTH - 5, ROWS).astype(np.int32))
    ids = torch.from_numpy(rng.integers(0, VOCAB, ROWS * WIDTH + 2).astype(np.int32))
    return RowColumns(known - 1, known, ids, torch.zeros(ROWS, 1, dtype=torch.int32), WIDTH, 16)


def copy_of(c: RowColumns) -> RowColumns:
    return RowColumns(
        c.num_computed.clone(), c.num_tokens.clone(), c.flat_token_ids.clone(), c.block_table, WIDTH, c.block_size
    )


def test_one_rows_logits_lie_behind_the_others() -> None:
    places = places_of(np.array([2, 0, 1]), CPU)
    assert (places.firsts.tolist(), places.counts.tolist()) == ([0, 3, 4], [3, 1, 2])
    assert places.firsts.dtype == places.counts.dtype == torch.int32, "as in a step over static tensors"


def test_other_stages_come_to_the_same_tokens_and_counts() -> None:
    """Even where theirs are others behind what both knew, and where drafts do not fit into the row."""
    rng, k = np.random.default_rng(1), 3
    for _ in range(50):
        c = columns(rng)
        c.num_tokens[0] = WIDTH
        rows = torch.from_numpy(rng.permutation(ROWS))
        num_drafts = torch.from_numpy(rng.integers(0, k + 1, ROWS))
        num_new = torch.minimum(torch.from_numpy(rng.integers(1, k + 2, ROWS)), num_drafts + 1)
        other = copy_of(c)
        write_drafts(c, rows, torch.from_numpy(rng.integers(5, 9, (ROWS, k))))
        for i, row in enumerate(rows.tolist()):  # as counted before it hears how many were accepted
            other.num_tokens[row] += int(num_drafts[i] + 1 - num_new[i])
            other.num_computed[row] += int(num_drafts[i] + 1 - num_new[i])
            first = int(c.num_tokens[row] - num_new[i])
            other.flat_token_ids[row * WIDTH + first : (row + 1) * WIDTH] = -7
        packed = pack(c, rows, num_new, k)
        assert packed.shape == (ROWS, width_of(k))
        unpack(other, rows, num_drafts, packed, k)
        assert torch.equal(other.num_tokens, c.num_tokens)
        assert torch.equal(other.num_computed, c.num_computed)
        for row in range(ROWS):
            end = min(WIDTH, int(c.num_tokens[row]) + k)
            mine, theirs = (x.flat_token_ids[row * WIDTH : row * WIDTH + end] for x in (c, other))
            assert torch.equal(mine, theirs)
