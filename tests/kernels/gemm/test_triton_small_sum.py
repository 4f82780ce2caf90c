"""Products of few rows with their sum over ranks: each rank's kernel, with what others send in its boxes already."""

from __future__ import annotations

import pytest
import torch

from app.kernels.fused import reference
from app.kernels.gemm.small_tiles import SmallTile
from app.kernels.gemm.triton_small_sum import linear_sum_norm, small_linear_sum
from tests.kernels.rank_boxes import AllBoxes

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter computes wrongly in bf16
EPS = 1e-5


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)


@pytest.mark.parametrize(("num_ranks", "splits", "columns"), [(2, 1, 96), (2, 4, 64), (4, 2, 72)])
def test_every_rank_has_the_product_of_all_inputs(num_ranks: int, splits: int, columns: int) -> None:
    boxes, tile = AllBoxes(num_ranks, 3 * columns, DEVICE), SmallTile(32, 64, 4, 2, splits)
    norm = randn(columns, seed=8)
    for turn, rows in enumerate((3, 1, 3)):
        xs = [randn(rows, 256, seed=20 * turn + rank) / 4 for rank in range(num_ranks)]
        weights = [randn(columns, 256, seed=20 * turn + 10 + rank) / 4 for rank in range(num_ranks)]
        biases = [randn(columns, seed=7) * (rank == 0) for rank in range(num_ranks)]
        residual = randn(rows, columns + 2, seed=9)[:, :columns]
        parts = [(x.float() @ w.float().T + b.float()).to(DTYPE) for x, w, b in zip(xs, weights, biases, strict=True)]
        normed, expected = reference.add_rms_norm(sum(part.float() for part in parts).to(DTYPE), residual, norm, EPS)
        for rank in range(num_ranks):
            own = boxes.of(rank, parts)
            deferred, total = small_linear_sum(
                own, xs[rank], weights[rank], biases[rank], residual, tile, (norm, EPS)
            )  # fmt: skip
            torch.testing.assert_close(total, expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(deferred.materialize(), normed, rtol=2e-2, atol=2e-2)
            assert own.clock.tolist() == [boxes.count, 0]
        boxes.count += 1


@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(65, 128, torch.bfloat16), (3, 128, torch.bfloat16), (2, 96, torch.bfloat16), (2, 128, torch.float16)],
)
def test_other_rows_are_another_kernels(rows: int, columns: int, dtype: torch.dtype) -> None:
    own, norm = AllBoxes(2, 128, DEVICE).of(0, []), torch.ones(128, device=DEVICE)
    x, weight = torch.zeros(rows, 256, device=DEVICE), torch.zeros(columns, 256, device=DEVICE)
    residual = torch.zeros(rows, columns, device=DEVICE)
    assert linear_sum_norm(own, x.to(dtype), weight.to(dtype), None, residual.to(dtype), norm, EPS) is None
    assert linear_sum_norm(own, x.bfloat16(), weight.bfloat16(), None, residual, norm, EPS) is None
