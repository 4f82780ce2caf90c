"""Which messages leave NCCL; the sums themselves need GPUs (benchmarks/all_reduce.py compares them with NCCL's)."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import UUID

import pytest
import torch

from app.distributed.parallel_groups import ParallelGroups, RankGroup
from app.distributed.symmetric_all_reduce import SymmetricAllReduce, _refusal, shots, with_small_all_reduce
from app.kernels.fused import RankBoxes
from app.layers.epilogue import PLAIN, AddNorm
from app.platforms.cuda import Cuda


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


@pytest.mark.parametrize(
    ("choice", "ranks", "dtype", "wanted"),
    [
        ("fused", 4, torch.bfloat16, True),
        ("auto", 2, torch.float16, True),
        ("auto", 2, torch.float32, False),
        ("symmetric_memory", 2, torch.bfloat16, False),
    ],
)
def test_boxes_are_made_where_they_are_of_use(
    monkeypatch: pytest.MonkeyPatch, choice: str, ranks: int, dtype: torch.dtype, wanted: bool
) -> None:
    votes: list[bool] = []

    def agree(group: RankGroup, is_ready: bool, device: torch.device) -> bool:
        votes.append(is_ready)
        return is_ready

    place = "app.distributed.symmetric_all_reduce"
    monkeypatch.setattr(f"{place}.empty_buffer", lambda *asked: "memory")
    monkeypatch.setattr(f"{place}.empty_boxes", lambda *asked: "memory")
    monkeypatch.setattr(f"{place}.SymmetricAllReduce", lambda *asked: "small")
    monkeypatch.setattr(f"{place}.make_boxes", lambda *asked: "boxes")
    monkeypatch.setattr(f"{place}._are_linked", lambda *asked: True)
    monkeypatch.setattr(RankGroup, "agree", agree)
    groups = ParallelGroups(tp=RankGroup(0, ranks, object()))  # type: ignore[arg-type]
    found, note = with_small_all_reduce(groups, choice, dtype, torch.device("cuda"), True)
    assert votes == [True, True]
    assert found.tp.small_all_reduce == "small"
    assert (found.tp.boxes, "one kernel" in note) == (("boxes", True) if wanted else (None, False))

    def fails(*asked: object) -> RankBoxes:
        raise RuntimeError("no peer access")

    monkeypatch.setattr(f"{place}.make_boxes", fails)
    found, note = with_small_all_reduce(groups, choice, dtype, torch.device("cuda"), True)
    assert votes[2:] == [True, not wanted]
    assert not wanted or (found is groups and "no peer access" in note)


@pytest.mark.parametrize("is_own", [True, False])
def test_no_rank_waits_for_others_that_have_no_memory(monkeypatch: pytest.MonkeyPatch, is_own: bool) -> None:
    """They would not come to the rendezvous, which has no end: ranks agree before it, and take NCCL."""

    def fails(*asked: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def meet(*asked: object) -> None:
        raise AssertionError("a rendezvous, though a rank has nothing to bring")

    votes: list[bool] = []

    def agree(group: RankGroup, is_ready: bool, device: torch.device) -> bool:
        votes.append(is_ready)
        return False

    place = "app.distributed.symmetric_all_reduce"
    monkeypatch.setattr(f"{place}.empty_buffer", lambda *asked: "memory")
    monkeypatch.setattr(f"{place}.empty_boxes", fails if is_own else lambda *asked: "memory")
    monkeypatch.setattr(f"{place}.SymmetricAllReduce", meet)
    monkeypatch.setattr(f"{place}._are_linked", lambda *asked: True)
    monkeypatch.setattr(RankGroup, "agree", agree)
    groups = ParallelGroups(tp=RankGroup(0, 2, object()))  # type: ignore[arg-type]
    found, note = with_small_all_reduce(groups, "auto", torch.bfloat16, torch.device("cuda"), True)
    assert found is groups
    assert votes == [not is_own]
    assert ("out of memory" if is_own else "another rank") in note


@pytest.mark.parametrize(("choice", "has_links"), [("auto", True), ("auto", False), ("fused", False)])
def test_what_was_measured_on_nvlink_is_chosen_there(
    monkeypatch: pytest.MonkeyPatch, choice: str, has_links: bool
) -> None:
    """Every rank's answer counts, about the devices of all; who asks for it gets it over PCIe, too."""
    own, other = UUID(int=5), UUID(int=7)
    asked: list[set[str]] = []

    class Linked(Cuda):
        def uuid(self, device: torch.device) -> str:
            return str(own)

        def are_linked(self, uuids: Collection[str]) -> bool:
            asked.append(set(uuids))
            return True

    place = "app.distributed.symmetric_all_reduce"
    monkeypatch.setattr(f"{place}.platform_of", lambda device: Linked())
    both = torch.tensor([list(own.bytes), list(other.bytes)])
    monkeypatch.setattr(RankGroup, "all_gather", lambda self, given, dim: both)
    monkeypatch.setattr(RankGroup, "agree", lambda self, answer, device: answer and has_links)
    for name in ("empty_buffer", "empty_boxes", "SymmetricAllReduce", "make_boxes"):
        monkeypatch.setattr(f"{place}.{name}", lambda *asked: "made")
    groups = ParallelGroups(tp=RankGroup(0, 2, object()))  # type: ignore[arg-type]
    found, note = with_small_all_reduce(groups, choice, torch.bfloat16, torch.device("cpu"), True)
    assert asked == ([{str(own), str(other)}] if choice == "auto" else [])
    assert ("no NVLink" in note) == (choice == "auto" and not has_links)
    assert (found is groups) == (not has_links)


class OfTwo(SymmetricAllReduce):
    """Beside a rank that has the same numbers, which torch's kernels add to this one's buffer."""

    def __init__(self) -> None:
        self._group_name, self._num_ranks, self._limits = "two", 2, (64, 1024)
        self._buffer = torch.full((512,), torch.nan)
        self._part = self._flat = self._buffer[:0]


def double_into(part: torch.Tensor, _: str, __: str, out: torch.Tensor) -> None:
    assert part.shape == out.shape, "torch's kernel asks for it"
    torch.mul(part, 2, out=out)


@pytest.fixture
def doubled() -> Any:
    kernels = SimpleNamespace(
        one_shot_all_reduce_out=double_into, two_shot_all_reduce_=lambda part, _, __: part.mul_(2)
    )
    with patch.object(torch.ops, "symm_mem", kernels, create=True):
        yield OfTwo()


@pytest.mark.parametrize("rows", [2, 32])
def test_a_sum_that_stays_is_in_place_and_one_that_is_lent_is_not_copied_back(doubled: OfTwo, rows: int) -> None:
    group = RankGroup(0, 2, object(), doubled)  # type: ignore[arg-type]
    for turn in range(1, 3):  # the same shape again
        x = torch.full((rows, 8), float(turn))
        assert group.all_reduce(x) is x
        assert (x == 2 * turn).all()
    wide = torch.full((rows // 2, 16), 5.0)  # as many numbers in another shape
    found = group.all_reduce(wide, lent=True)
    assert found.shape == wide.shape
    assert (found == 10).all()
    assert (found.data_ptr() == doubled._buffer.data_ptr()) == (rows == 32)


def test_only_what_is_read_at_once_is_lent(doubled: OfTwo) -> None:
    """A sum with the residual is new memory; a product alone may be kept by who asked for it."""
    group = RankGroup(0, 2, object(), doubled)  # type: ignore[arg-type]
    kept = PLAIN.after_all_reduce(group, torch.full((32, 8), 1.0))
    y = torch.full((32, 8), 2.0)
    _, total = AddNorm(torch.full((32, 8), 0.5), None).after_all_reduce(group, y)
    assert (y == 2).all(), "the sum was copied back"
    PLAIN.after_all_reduce(group, torch.full((32, 8), 3.0))
    assert (kept == 2).all()
    assert (total == 4.5).all()
