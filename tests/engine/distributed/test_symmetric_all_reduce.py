"""Which messages leave NCCL; the sums themselves need GPUs (benchmarks/all_reduce.py compares them with NCCL's)."""

from __future__ import annotations

import pytest
import torch

from app.engine.distributed.parallel_groups import ParallelGroups, RankGroup
from app.engine.distributed.symmetric_all_reduce import _refusal, shots, with_small_all_reduce


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 0), (64, 1), (1024, 1), (1088, 2), (4096, 2), (4160, 0), (100, 0), (1000, 0)]
)
def test_the_size_decides(num_bytes: int, expected: int) -> None:
    assert shots(num_bytes, 4, (1024, 4096)) == expected


def test_a_cpu_stays_with_gloo() -> None:
    groups = ParallelGroups()
    same, note = with_small_all_reduce(groups, "symmetric_memory", torch.float32, torch.device("cpu"), True)
    assert same is groups
    assert note == "all-reduce: gloo (CPU)"


@pytest.mark.parametrize(
    ("size", "choice", "one_node", "reason"),
    [
        (2, "auto", True, None),
        (4, "auto", True, "nothing else was measured for 4 ranks"),
        (4, "symmetric_memory", True, None),
        (2, "nccl", True, "as configured"),
        (2, "auto", False, "the ranks lie on several nodes"),
    ],
)
def test_who_may_leave_nccl(size: int, choice: str, one_node: bool, reason: str | None) -> None:
    groups = ParallelGroups(tp=RankGroup(0, size, object()))  # type: ignore[arg-type]
    assert _refusal(groups, choice, torch.device("cuda"), one_node) == reason
