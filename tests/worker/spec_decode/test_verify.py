"""What verification keeps, against a loop; and that another pipeline stage comes to the same rows."""

from __future__ import annotations

import numpy as np
import torch

from app.kernels.rows import RowColumns
from app.worker.spec_decode.feedback import pack, unpack, width_of
from app.worker.spec_decode.verify import LogitsPlaces, keep_accepted, write_drafts

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


def test_up_to_the_first_that_differs() -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        c = columns(rng)
        before = copy_of(c)
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]
        drafts = rng.integers(0, 4, len(rows))
        firsts = [int(before.num_tokens[row]) - 1 - d for row, d in zip(rows.tolist(), drafts.tolist(), strict=True)]
        targets = [row * WIDTH + f + j for row, f, d in zip(rows, firsts, drafts, strict=True) for j in range(d + 1)]
        drawn = rng.integers(0, VOCAB, len(targets))
        found = keep_accepted(
            c, torch.from_numpy(rows), LogitsPlaces.of(drafts, CPU), torch.tensor(targets), torch.from_numpy(drawn)
        )
        at = 0
        for i, (row, d) in enumerate(zip(rows.tolist(), drafts.tolist(), strict=True)):
            told = before.flat_token_ids[row * WIDTH + firsts[i] :][:d].tolist()
            mine, at = drawn[at : at + d + 1].tolist(), at + d + 1
            accepted = next((j for j in range(d) if mine[j] != told[j]), d)
            assert found[i] == accepted + 1
            kept = c.flat_token_ids[row * WIDTH + firsts[i] :][: accepted + 1].tolist()
            assert kept == mine[: accepted + 1]
            assert int(c.num_tokens[row]) == firsts[i] + accepted + 1 == int(c.num_computed[row]) + 1
            seen.add((d, accepted))
        others = [row for row in range(ROWS) if row not in rows]
        assert torch.equal(c.num_tokens[others], before.num_tokens[others])
    assert seen == {(d, accepted) for d in range(4) for accepted in range(d + 1)}


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


def test_drafts_past_the_end_of_a_row_hurt_nobody() -> None:
    c = columns(np.random.default_rng(2))
    c.num_tokens[3] = WIDTH - 1
    before = c.flat_token_ids.clone()
    write_drafts(c, torch.tensor([3]), torch.tensor([[50, 51, 52]]))
    changed = (before != c.flat_token_ids).nonzero().flatten().tolist()
    assert changed[0] == 3 * WIDTH + WIDTH - 1
    assert set(changed) <= {3 * WIDTH + WIDTH - 1, ROWS * WIDTH + 1}
