"""Where a step's tokens lie, against a loop over rows and positions: PyTorch, and Triton (interpreter, or a GPU)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from app.kernels.rows import BEGIN_STEP, RowColumns, StepTensors, reference, triton_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATHS = [pytest.param(reference.begin_step, id="torch"), pytest.param(triton_ops.begin_step, id="triton")]
ROWS, WIDTH, SPARE = 9, 700, 9 * 700


def columns(rng: np.random.Generator, block_size: int, num_groups: int = 1) -> RowColumns:
    """Rows at random places, tokens that tell where they stand."""
    num_tokens = rng.integers(1, WIDTH - 14, ROWS)
    table = rng.permutation(num_groups * ROWS * -(-WIDTH // block_size)).reshape(num_groups * ROWS, -1)

    def device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(DEVICE)

    return RowColumns(
        device(rng.integers(0, num_tokens)), device(num_tokens), device(np.arange(SPARE + 2) * 3), device(table), WIDTH,
        block_size,
    )  # fmt: skip


def slot_of(row: int, position: int, columns: RowColumns, group: int = 0) -> int:
    if row < 0:
        return -1
    size = columns.block_size
    return int(columns.block_table[group * ROWS + row, position // size]) * size + position % size


def expected_of(
    row: int, first: int, held: int, count: int, columns: RowColumns
) -> list[tuple[int, int, int, int, int]]:
    """input id, position, slot, length, target of each of `count` places, of which the row fills `held`."""
    padding = [(SPARE * 3, 0, -1, 1, SPARE + 1)]
    if row < 0:
        return padding * count
    return [
        ((row * WIDTH + p) * 3, p, slot_of(row, p, columns), p + 1, row * WIDTH + p + 1)
        for p in range(first, first + held)
    ] + padding * (count - held)


@pytest.mark.parametrize("step", PATHS)
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize(
    ("kind", "num_groups"),
    [
        ("decode", 1),
        ("padded", 1),
        ("mixed", 1),
        ("drafts", 1),
        ("padded", 3),
        ("mixed", 4),
        ("places", 1),
        ("places", 3),
    ],
)
def test_against_a_loop(step: Callable[..., None], kind: str, num_groups: int, block_size: int) -> None:
    rng = np.random.default_rng(len(kind) + block_size)
    c = columns(rng, block_size, num_groups)
    computed, known = c.num_computed.tolist(), c.num_tokens.tolist()
    rows = rng.permutation(ROWS)[: rng.integers(2, ROWS)].tolist()
    left = [known[row] - computed[row] for row in rows]
    counts = [1] * len(rows) if kind in ("decode", "padded") else [int(rng.integers(1, n + 1)) for n in left]
    if kind == "mixed":
        counts[0] = left[0]
    if kind == "drafts":
        counts = [n + 3 for n in left]
    if kind == "padded":
        rows, counts = [*rows, -1, -1], [*counts, 1, 1]
    held = counts
    if kind == "places":  # four of each row, of which it fills one to four
        rows = [*rows, -1]
        counts, held = [4] * len(rows), [*rng.integers(1, 5, len(rows) - 1).tolist(), 1]
    starts = np.concatenate(([0], np.cumsum(counts)))
    out = StepTensors.zeros(int(starts[-1]), len(rows), torch.device(DEVICE), num_groups)
    for name in StepTensors.__slots__:
        getattr(out, name).fill_(-99)
    sent = torch.tensor([7, *rows, *starts.tolist()], dtype=torch.int32, device=DEVICE)  # views that are not aligned
    filled = torch.tensor(held, dtype=torch.int32, device=DEVICE) if kind == "places" else None
    step(sent[1 : 1 + len(rows)], sent[1 + len(rows) :], c, out, filled)
    found = list(
        zip(*(getattr(out, n).tolist() for n in ("input_ids", "positions", "slots", "lengths", "targets")), strict=True)
    )
    places = [(row, computed[row] if row >= 0 else 0, n, all_) for row, n, all_ in zip(rows, held, counts, strict=True)]
    assert found == [token for place in places for token in expected_of(*place, c)]
    assert out.more_slots.tolist() == [
        [slot_of(row, first + j, c, group) if j < n else -1 for row, first, n, all_ in places for j in range(all_)]
        for group in range(1, num_groups)
    ]
    assert out.rows.tolist() == [max(row, 0) for row in rows]
    assert out.seq_lens.tolist() == [first + count for _, first, _, count in places]
    for row, first, count, _ in places:
        if row >= 0:
            computed[row] = first + count
            known[row] = max(known[row], computed[row] + 1)
    assert (c.num_computed.tolist(), c.num_tokens.tolist()) == (computed, known)


@pytest.mark.parametrize("step", PATHS)
def test_steps_one_after_another_need_nothing_but_rows(step: Callable[..., None]) -> None:
    """A request from its prompt on, in chunks and then token by token (I1): the host never says where it stands."""
    c = columns(np.random.default_rng(0), 16)
    c.num_computed[4], c.num_tokens[4] = 0, 600
    row, seen = torch.tensor([4], dtype=torch.int32, device=DEVICE), []
    for count in [300, 299, 1, 1, 1]:
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        out = StepTensors.zeros(count, 1, torch.device(DEVICE))
        step(row, starts, c, out)
        seen += out.positions.tolist()
    assert seen == list(range(602))
    assert (int(c.num_computed[4]), int(c.num_tokens[4])) == (602, 603)


def test_the_device_chooses_the_path() -> None:
    c = columns(np.random.default_rng(1), 4)
    rows, starts = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    ours = BEGIN_STEP.on(torch.device(DEVICE))
    assert ours is (triton_ops if DEVICE == "cuda" else reference).begin_step
    ours(rows.to(DEVICE), starts.to(DEVICE), c, StepTensors.zeros(1, 1, torch.device(DEVICE)))
