"""A file's pieces as they are decoded, and the memory that they count as."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.api.http.held_bytes import HeldBytes, Holding
from app.api.http.work_pool import RequestWork, WorkPool
from app.api.openai.audio.incoming import Incoming
from app.api.openai.audio.turns import Turns
from app.errors import InvalidRequestError, OverloadedError
from tests import limits

RATE, PIECE_S = 1_000, 1.0
FEATURES_BYTES = 60_000  # of a piece
SECOND = np.zeros(RATE, np.int16)


class Reader:
    """Gives blocks of a second; each but the first waits until it may."""

    def __init__(self, count: int, known: int = 0, error: Exception | None = None) -> None:
        self.may_go_on = threading.Event()
        self._count, self._known, self._error = count, known, error

    def known_bytes(self, data: bytes, rate: int) -> int:
        return self._known

    def blocks(self, data: bytes, rate: int) -> Generator[Any, None, None]:
        for _ in range(self._count):
            yield SECOND
            assert self.may_go_on.wait(limits.patience_s())
        if self._error is not None:
            raise self._error


@pytest.fixture
def held() -> HeldBytes:
    return HeldBytes(1 << 20)


@pytest.fixture
def pool() -> WorkPool:
    return WorkPool(2)


def incoming(pool: WorkPool, held: HeldBytes, reader: Reader) -> Incoming:
    speech: Any = SimpleNamespace(reader=reader, rate=RATE, piece_s=PIECE_S)
    holding = Holding(held, "t")
    turns = Turns(64, holding, FEATURES_BYTES)
    return Incoming(RequestWork(pool, "t", holding=holding), speech, b"file", "file", turns)


def test_pieces_come_before_the_file_is_whole(pool: WorkPool, held: HeldBytes) -> None:
    async def run() -> None:
        reader = Reader(3)
        own = incoming(pool, held, reader)
        await own.hold()
        task = asyncio.create_task(own.run())
        await limits.until(lambda: held.total == SECOND.nbytes)
        assert not own.is_whole
        whole = asyncio.create_task(own.whole())
        reader.may_go_on.set()
        first = await own.piece(0)
        await task
        await whole
        assert own.is_whole
        assert first is own.pieces[0]
        assert sum(len(piece.samples) for piece in own.pieces) == 3 * RATE
        assert own.seconds == 3.0
        assert await own.piece(len(own.pieces)) is None
        assert held.total == 3 * SECOND.nbytes

    limits.run(run())


@pytest.mark.parametrize("known", [5, 5_000, 20_000])
def test_what_a_file_shows_counts_before_and_what_it_has_counts_at_last(
    pool: WorkPool, held: HeldBytes, known: int
) -> None:
    async def run() -> None:
        reader = Reader(3, known)
        reader.may_go_on.set()
        own = incoming(pool, held, reader)
        await own.hold()
        assert held.total == known
        await own.run()
        assert held.total == 3 * SECOND.nbytes

    limits.run(run())


def test_no_room_midway_is_a_refusal(pool: WorkPool) -> None:
    async def run() -> None:
        reader = Reader(200)
        reader.may_go_on.set()
        own = incoming(pool, HeldBytes(1 << 18), reader)
        await own.hold()
        with pytest.raises(OverloadedError, match="bytes together"):
            await own.run()
        assert not own.is_whole

    limits.run(run())


@pytest.mark.parametrize("known", [0, 100 * SECOND.nbytes])
def test_pieces_that_are_heard_meanwhile_take_no_room_from_samples(pool: WorkPool, known: int) -> None:
    """A long file takes longer where memory is short; it is not refused in its midst."""

    async def run() -> None:
        held = HeldBytes(2 * (100 * SECOND.nbytes + FEATURES_BYTES // 2))  # half of it a tenant's
        reader = Reader(100, known)
        own = incoming(pool, held, reader)
        await own.hold()
        task = asyncio.create_task(own.run())
        await limits.until(lambda: held.total == max(known, SECOND.nbytes))
        waiting = [asyncio.create_task(own.turns.take()) for _ in range(4)]
        await limits.until(lambda: own.turns.num_bytes >= (FEATURES_BYTES if known else 3 * FEATURES_BYTES))
        reader.may_go_on.set()
        await task
        assert own.is_whole
        assert held.total == 100 * SECOND.nbytes + own.turns.num_bytes
        for one in waiting:
            one.cancel()

    limits.run(run())


def test_another_request_s_piece_takes_no_room_that_was_found(pool: WorkPool) -> None:
    async def run() -> None:
        known = 3 * SECOND.nbytes + 70_000
        held = HeldBytes(2 * known)
        reader = Reader(3, known)
        reader.may_go_on.set()
        own = incoming(pool, held, reader)
        await own.hold()
        await Turns(64, Holding(held, "t"), FEATURES_BYTES).take()
        await own.run()
        assert held.total == 3 * SECOND.nbytes + FEATURES_BYTES

    limits.run(run())


def test_a_file_s_fault_names_its_field(pool: WorkPool, held: HeldBytes) -> None:
    async def run() -> None:
        reader = Reader(1, error=InvalidRequestError("breaks off"))
        reader.may_go_on.set()
        with pytest.raises(InvalidRequestError, match="file breaks off"):
            await incoming(pool, held, reader).run()

    limits.run(run())


def test_what_comes_behind_the_end_of_a_request_holds_nothing(pool: WorkPool, held: HeldBytes) -> None:
    async def run() -> None:
        reader = Reader(2)
        own = incoming(pool, held, reader)
        task = asyncio.create_task(own.run())
        await limits.until(lambda: held.total == SECOND.nbytes)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        own._take(SECOND.nbytes, [])  # as the thread may have asked for already
        assert held.total == SECOND.nbytes
        reader.may_go_on.set()

    limits.run(run())
