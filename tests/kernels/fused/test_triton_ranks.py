"""The sum over ranks with residual and norm: each rank's kernel, with what the others send in its boxes already. Real
ranks: tests/distributed/test_rank_boxes.py."""

from __future__ import annotations

import pytest
import torch

from app.kernels.fused import reference
from app.kernels.fused.triton_ranks import serves, sum_add_norm
from tests.kernels.rank_boxes import AllBoxes

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter computes wrongly in bf16.
DTYPES = [torch.float16, *([torch.bfloat16] if ON_GPU else [])]
EPS = 1e-5


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_has_the_sum_in_the_order_of_ranks(dtype: torch.dtype, num_ranks: int) -> None:
    size, boxes = 330, AllBoxes(num_ranks, 3 * 256, DEVICE)
    for turn in range(3):  # both sets of boxes, and one again, with fewer rows
        rows = 3 - turn
        weight = randn(size, seed=8, dtype=torch.float32 if turn == 1 else dtype)  # fp32: Gemma's
        parts = [randn(rows, size + 6, seed=10 * turn + rank, dtype=dtype)[:, :size] for rank in range(num_ranks)]
        residual = randn(rows, size + 2, seed=9, dtype=dtype)[:, :size]
        summed = parts[0].float()
        for part in parts[1:]:
            summed = summed + part.float()
        normed, expected = reference.add_rms_norm(summed.to(dtype), residual, weight, EPS)
        for rank in range(num_ranks):
            own = boxes.of(rank, parts)
            found = sum_add_norm(own, parts[rank], residual, weight, EPS)
            assert found is not None
            assert torch.equal(found[1], expected)
            torch.testing.assert_close(found[0], normed, rtol=8e-3, atol=4e-3)
            assert own.clock.tolist() == [boxes.count, 0]
            sent, others = boxes.sent(parts[rank]), [other for other in range(num_ranks) if other != rank]
            assert all(torch.equal(boxes.got(other, rank, len(sent)), sent) for other in others)
        boxes.count += 1


def test_counts_begin_anew_behind_the_largest() -> None:
    boxes = AllBoxes(2, 64, DEVICE)
    parts = [randn(1, 64, seed=rank, dtype=torch.float16) for rank in range(2)]
    for boxes.count, before in ((-(1 << 31), (1 << 31) - 1), (0, -1)):
        boxes.clocks[:, 0] = before
        own = boxes.of(1, parts)
        found = sum_add_norm(own, parts[1], torch.zeros_like(parts[0]), parts[0][0], EPS)
        assert found is not None
        assert torch.equal(found[1], (parts[0].float() + parts[1].float()).half())
        assert own.clock.tolist() == [boxes.count, 0]


def test_what_the_boxes_do_not_hold_is_another_kernels() -> None:
    own = AllBoxes(2, 64, DEVICE).of(0, [])
    row = torch.zeros(1, 128, dtype=torch.float16, device=DEVICE)
    assert serves(own, row, row)
    assert serves(own, row[:, 2:], row[:, 2:])
    for other in (
        row.expand(2, -1),
        row.float(),
        row[:, :127],
        row[:, ::2],
        row[:0],
        torch.zeros(2, 129).half()[:, :2],
    ):
        assert not serves(own, other, row)
    for other in (row.float(), torch.zeros(1, 130).half()[:, 1:129]):
        assert not serves(own, row, other)
    assert sum_add_norm(own, row.repeat(2, 1), row, row[0], EPS) is None
