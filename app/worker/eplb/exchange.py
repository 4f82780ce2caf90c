"""Moves experts of one layer between the slots of the ranks, beside the steps.

What comes into a slot is gathered in memory of its own first, a few experts before each step, while steps go on
computing with what the slots hold; then, between two steps, it is copied into them and the layer's table says so: on
every rank before the same step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from app.distributed.parallel_groups import RankGroup
from app.layers.experts.expert_mlp import Experts
from app.layers.experts.placement import Slots
from app.platforms import platform_of

# What a rank sends or receives before one step, most: what that costs the host, and the links, must not hold a step up.
MOVES_A_STEP = 8
BYTES_A_STEP = 64 << 20
MOST_BYTES = 8 << 20  # of the first message


@dataclass(slots=True, frozen=True)
class Move:
    """A copy of an expert to come: from a slot of one rank to that of another, or of the same."""

    source: tuple[int, int]  # rank, slot
    target: tuple[int, int]


def moves_between(held: Slots, wanted: Slots) -> Iterator[Move]:
    """Yields what has to move, in an order that is the same on every rank; a rank that has the expert is its own
    source."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(held.tolist()):
        for slot, expert in enumerate(row):
            holders.setdefault(expert, []).append((rank, slot))
    for rank, row in enumerate(wanted.tolist()):
        for slot, expert in enumerate(row):
            if held[rank, slot] != expert:
                places = holders[expert]
                own = [place for place in places if place[0] == rank]
                yield Move((own or places)[(rank + slot) % len(own or places)], (rank, slot))


def turns_of(moves: Iterable[Move], most: int) -> Iterator[list[Move]]:
    """The moves in their order, in turns of which each has a rank take part in `most` of them."""
    turn: list[Move] = []
    busy = Counter[int]()
    for move in moves:
        ranks = {move.source[0], move.target[0]}
        if any(busy[rank] >= most for rank in ranks):
            yield turn
            turn, busy = [], Counter()
        turn.append(move)
        busy.update(ranks)
    if turn:
        yield turn


class Exchange:
    """One layer's move at a time: `begin`, `advance` before steps until it has nothing left, some steps, `finish`."""

    def __init__(self, layers: Sequence[Experts], group: RankGroup, device: torch.device) -> None:
        self._group = group
        self._staged = torch.empty(max(map(_num_bytes, layers)), dtype=torch.uint8, device=device)
        self._runtime = platform_of(device).runtime
        self._stream = None if self._runtime is None else self._runtime.Stream(device)
        self._device = device
        self._works: list[Any] = []
        self._moving: tuple[Experts, Slots, list[int]] | None = None
        self._turns: Iterator[list[Move]] = iter(())
        self._meet(layers[0])

    def _meet(self, layer: Experts) -> None:
        """Send to all peers, receive and copy once: libraries connect and load kernels at first, which takes longer
        than a step may."""
        size = min(MOST_BYTES, len(self._staged) // 2)
        mine, theirs = self._staged[:size], self._staged[size : 2 * size]
        met: list[dist.P2POp] = []
        for rank in range(self._group.size):
            if rank != self._group.rank:
                met += [self._operation(dist.isend, mine, rank), self._operation(dist.irecv, theirs, rank)]
        for work in dist.batch_isend_irecv(met) if met else []:
            work.wait()
        for tensor, staged in zip(layer.slot_tensors, self._views(layer), strict=True):
            torch._foreach_copy_([staged[0]], [tensor[0]])

    @property
    def is_moving(self) -> bool:
        """True if a move has begun and not been finished."""
        return self._moving is not None

    def begin(self, layer: Experts, wanted: Slots) -> None:
        """From now on gather what `wanted` [R, S] has and the layer has not."""
        assert layer.map is not None
        moves = list(moves_between(layer.map.slots, wanted))
        own = [move.target[1] for move in moves if move.target[0] == self._group.rank]
        each = sum(tensor[0].numel() * tensor.itemsize for tensor in layer.slot_tensors)
        self._turns = turns_of(moves, max(1, min(MOVES_A_STEP, BYTES_A_STEP // each)))
        self._moving = layer, wanted, own
        if self._stream is not None:  # what was gathered before has been copied by then
            self._stream.wait_stream(self._runtime.current_stream(self._device))

    def advance(self) -> bool:
        """Gather some more; False: all is under way. Collective."""
        assert self._moving is not None
        turn = next(self._turns, None)
        if turn is None:
            return False
        with nullcontext() if self._stream is None else self._runtime.stream(self._stream):
            self._gather(self._moving[0], turn)
        return True

    def finish(self) -> None:
        """Fill the slots. On a GPU the step's stream waits for what is still under way, the host does not. Collective
        where something is left to gather."""
        while self.advance():
            pass
        assert self._moving is not None
        (layer, wanted, own), self._moving = self._moving, None
        assert layer.map is not None
        for work in self._works:
            work.wait()
        self._works = []
        if self._stream is not None:
            self._runtime.current_stream(self._device).wait_stream(self._stream)
        for tensor, staged in zip(layer.slot_tensors, self._views(layer), strict=True):
            if own:  # one launch
                torch._foreach_copy_([tensor[slot] for slot in own], [staged[slot] for slot in own])
        layer.map.hold(wanted)

    def _gather(self, layer: Experts, moves: Sequence[Move]) -> None:
        """Copies within the rank; sends and receives for the others."""
        rank, sent = self._group.rank, []
        for tensor, staged in zip(layer.slot_tensors, self._views(layer), strict=True):
            for move in moves:
                (source, from_slot), (target, to_slot) = move.source, move.target
                if source == target == rank:
                    staged[to_slot].copy_(tensor[from_slot])
                elif source == rank:
                    sent.append(self._operation(dist.isend, tensor[from_slot], target))
                elif target == rank:
                    sent.append(self._operation(dist.irecv, staged[to_slot], source))
        works = dist.batch_isend_irecv(sent) if sent else []
        if self._stream is None:
            self._works += works
            return
        for work in works:  # this stream waits, not the host
            work.wait()

    def _operation(self, kind: Any, tensor: torch.Tensor, peer: int) -> dist.P2POp:
        """Send or receive; bytes, which every backend takes."""
        return dist.P2POp(kind, tensor.view(-1).view(torch.uint8), group=self._group.handle, group_peer=peer)

    def _views(self, layer: Experts) -> list[torch.Tensor]:
        """The gathering memory as tensors like the layer's."""
        views, begin = [], 0
        for tensor in layer.slot_tensors:
            size = tensor.numel() * tensor.itemsize
            views.append(self._staged[begin : begin + size].view(tensor.dtype).view(tensor.shape))
            begin += _aligned(size)
        return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def _num_bytes(layer: Experts) -> int:
    return sum(_aligned(tensor.numel() * tensor.itemsize) for tensor in layer.slot_tensors)
