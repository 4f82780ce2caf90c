"""The pieces of a file, each as soon as so much of it is decoded: what is known is heard while the rest is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from app.api.http.held_bytes import Holding
from app.api.http.work_pool import PARSE_S_PER_BYTE, RequestWork
from app.api.openai.audio.turns import Turns
from app.errors import OverloadedError
from app.media.audio.sound import Cutter, Piece
from app.media.reader import in_field
from app.text.speech import Speech


class Incoming:
    """One file's. Its samples count as held, before they are made where the file shows how many there are. Its pieces
    take `turns`, and what they hold meanwhile takes no room from its samples."""

    def __init__(self, work: RequestWork, speech: Speech, data: bytes, field: str, turns: Turns) -> None:
        self.pieces: list[Piece] = []
        self.is_whole = False  # no more pieces come
        self.field = field  # where the sound came in
        self.turns = turns
        self._work, self._speech, self._data = work, speech, data
        self._held = self._num_bytes = 0
        self._refusal: OverloadedError | None = None
        self._has_left = False
        self._came = asyncio.Event()

    @property
    def seconds(self) -> float:
        """The length of what has come."""
        return self.pieces[-1].end_s if self.pieces else 0.0

    @property
    def _holding(self) -> Holding:
        return self._work.holding

    async def hold(self) -> None:
        """Count what the file shows. OverloadedError where there is no room for it."""
        cost_s = PARSE_S_PER_BYTE * len(self._data)
        self._held = await self._work.run(cost_s, self._speech.reader.known_bytes, self._data, self._speech.rate)
        self._holding.add(self._held)

    async def run(self) -> None:
        """Decode all of it. Raises what is wrong with the file, or that it finds no room."""
        try:
            with in_field(self.field):
                await self._work.run_long_process(self._decode, asyncio.get_running_loop())
        finally:
            self._has_left = True
        if self._refusal is not None:
            raise self._refusal
        self._holding.give_back(self._held - self._num_bytes)
        self.is_whole = True
        self._came.set()

    async def piece(self, index: int) -> Piece | None:
        """The piece of that number, once it has come; None: there are not so many."""
        while index >= len(self.pieces) and not self.is_whole:
            self._came.clear()
            await self._came.wait()
        return self.pieces[index] if index < len(self.pieces) else None

    async def whole(self) -> None:
        """Wait until all of it has come, which never is where it is refused."""
        while not self.is_whole:
            self._came.clear()
            await self._came.wait()

    def _decode(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread, until the last sample or until nobody waits for any."""
        cutter = Cutter(self._speech.rate, self._speech.piece_s)
        with closing(self._speech.reader.blocks(self._data, self._speech.rate)) as blocks:
            for samples in blocks:
                if self._has_left:
                    return
                loop.call_soon_threadsafe(self._take, samples.nbytes, [*cutter.add(samples)])
        loop.call_soon_threadsafe(self._take, 0, [*cutter.end()])

    def _take(self, num_bytes: int, pieces: Sequence[Piece]) -> None:
        if self._has_left:  # what was on its way as the request ended holds nothing
            return
        self._num_bytes += num_bytes
        more = max(0, self._num_bytes - self._held)
        self._held += more
        try:
            if more:  # what found room before keeps it
                self._holding.add(more, besides=self.turns.num_bytes)
        except OverloadedError as error:
            self._refusal, self._has_left = error, True
        self.pieces += pieces
        self._came.set()
