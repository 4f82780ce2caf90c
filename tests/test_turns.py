"""Turns of items that are no requests; the engine's queue, which is made of the same, has tests of its own."""

from __future__ import annotations

from dataclasses import dataclass

from app.turns import TenantTurns


@dataclass(eq=False)
class Piece:
    tenant: str
    rank: int
    cost: float = 1.0


def order(turns: TenantTurns[Piece], count: int, *, give_back: bool = False) -> str:
    """The tenants that are served next, one after the other."""
    served = ""
    for _ in range(count):
        piece = turns.first
        assert piece is not None
        turns.serve(piece)
        served += piece.tenant
        if give_back:
            turns.settle(piece, -piece.cost)
    return served


def test_tenants_take_turns_whatever_they_have_queued() -> None:
    turns = TenantTurns[Piece](1.0)
    for rank in range(6):
        turns.push(Piece("a", rank))
    assert order(turns, 2) == "aa"
    for rank in range(6, 9):
        turns.push(Piece("b", rank))
    turns.push(Piece("c", 9))
    assert [piece.tenant for piece in turns.in_order()] == [*"bcababaa"]
    assert order(turns, 8) == "bcababaa"
    assert turns.first is None


def test_costly_pieces_wait_for_as_much_work_of_others() -> None:
    turns = TenantTurns[Piece](2.0)
    for rank in range(4):
        turns.push(Piece("a", rank, 4.0))
    for rank in range(4, 12):
        turns.push(Piece("b", rank))
    assert order(turns, 12) == "bbabbbbabbaa"


def test_what_is_given_back_goes_to_who_holds_least() -> None:
    turns = TenantTurns[Piece](1.0, are_given_back=True)
    pieces = [Piece("a", rank) for rank in range(8)]
    for piece in pieces:
        turns.push(piece)
    assert order(turns, 4) == "aaaa"
    for rank in range(8, 12):
        turns.push(Piece("b", rank))
    assert order(turns, 4) == "bbbb", "it holds none, however long the other has waited"
    turns.settle(pieces[0], -1.0)
    assert order(turns, 2) == "aa"


def test_one_that_leaves_the_queue_takes_nobodys_place() -> None:
    turns = TenantTurns[Piece](1.0)
    first, second, other = Piece("a", 0), Piece("a", 1), Piece("b", 2)
    for piece in (first, second, other):
        turns.push(piece)
    turns.remove(first)
    assert order(turns, 2) == "ab"
    turns.settle(second, 0.0)
    turns.settle(other, 0.0)
    assert not turns.is_waited_for
    assert turns.num_running == 0
