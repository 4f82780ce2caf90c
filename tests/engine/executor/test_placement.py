"""The order of bundles, and which GPU is whose, without a cluster."""

from __future__ import annotations

import pytest

from app.engine.executor.placement import sort_bundles
from app.engine.executor.worker_group.device_index import device_index


@pytest.mark.parametrize(
    ("nodes", "tp", "expected"),
    [
        ("aaaa", 2, [1, 2, 3, 4]),
        ("abab", 2, [1, 3, 2, 4]),  # each pair on one node
        ("abba", 1, [1, 4, 2, 3]),  # stages in a row on a node
        ("aabbab", 3, [1, 2, 5, 3, 4, 6]),
        ("aaabbb", 2, [1, 2, 4, 5, 3, 6]),  # what cannot be whole comes last
    ],
)
def test_tensor_parallel_groups_share_nodes(nodes: str, tp: int, expected: list[int]) -> None:
    node_of = dict(enumerate("-" + nodes))
    assert sort_bundles(range(1, len(nodes) + 1), node_of, tp) == expected


@pytest.mark.parametrize(
    ("assigned", "visible", "keeps_all", "index"),
    [
        (None, None, False, 3),  # a local process: by local rank
        ([], "", False, 3),  # an actor without a GPU
        (["5"], "5", False, 0),  # Ray shows it nothing else
        ([2], None, True, 2),
        (["6"], "4,5,6,7", True, 2),
        (["GPU-b"], "GPU-a, GPU-b", True, 1),
    ],
)
def test_device_index(assigned: list[str | int] | None, visible: str | None, keeps_all: bool, index: int) -> None:
    assert device_index(3, assigned, visible, keeps_all) == index
