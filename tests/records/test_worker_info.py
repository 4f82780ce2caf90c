"""Ranks that share a node, by what a worker group is told before it starts."""

from __future__ import annotations

import pytest

from app.records.worker_info import RendezvousInfo


@pytest.mark.parametrize(("ranks", "together"), [((0, 1), True), ((1, 2), False), ((2, 3), True), ((0, 1, 3), False)])
def test_ranks_share_a_node(ranks: tuple[int, ...], together: bool) -> None:
    rendezvous = RendezvousInfo(("10.0.0.1", 4000), ("a", "a", "b", "b"))
    assert rendezvous.share_a_node(ranks) is together
