"""All pieces of a sound side by side: their texts as one stream of events, and what became of each at the end.

Pieces are heard while the file is still decoded. Events come in the order of the pieces, each piece's as soon as those
before it have ended, and none before the file is decoded: one that breaks off is refused as a whole. Leaving the stream
early ends what still runs.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from starlette.types import Receive

from app.api.engine_client import EngineClient, RouteInfo
from app.api.generation.events import Event
from app.api.http.errors import ClientDisconnected
from app.api.http.work_pool import RequestWork
from app.api.openai.audio.alignment import WARP_S_PER_CELL, token_ends
from app.api.openai.audio.attempts import Ask, Attempt, PieceRequests
from app.api.openai.audio.incoming import Incoming
from app.api.openai.audio.timing import Timing
from app.media.audio.sound import Piece
from app.media.reader import in_field
from app.records.outputs import CompletionOutput
from app.text.speech import Detected


@dataclass(slots=True)
class Heard:
    """One piece and what it became; `attempt` is the last one."""

    piece: Piece
    attempt: Attempt
    ends_s: Sequence[float] = ()  # when each of its tokens was heard, from the piece's begin; (): nobody asked

    @property
    def is_silence(self) -> bool:
        """True if nobody speaks in it."""
        return self.attempt.is_silence


class Listening:
    """Use as `async with`. Where `is_live`, each token is an event as it comes, and
    nothing is asked again: what was said cannot be taken back."""

    def __init__(
        self,
        client: EngineClient,
        work: RequestWork,
        receive: Receive,
        ask: Ask,
        incoming: Incoming,
        language: str | None,
        timing: Timing,
        is_live: bool,
    ) -> None:
        self.ask, self.timing = ask, timing
        self.language = language  # as Detected has it; where it is not given, that of the first piece with speech
        self.heard: list[Heard] = []  # once the stream has ended: all pieces in order
        self.route = RouteInfo()
        self._client = client
        self._work = work
        self._receive = receive
        self._incoming = incoming
        self._is_live = is_live
        self._turns = incoming.turns
        self._events: defaultdict[int, list[Event]] = defaultdict(list)  # of each piece
        self._current = 0  # the piece whose events go out
        self._done: dict[int, Heard] = {}
        self._error: Exception | None = None
        self._has_ended = False
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def seconds(self) -> float:
        """The length of the sound, once its stream has ended."""
        return self._incoming.seconds

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch_client())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_batch(self) -> list[Event]:
        """Every event that is ready, at least one; [] once all pieces have ended. Raises what a piece raised, and
        ClientDisconnected."""
        while True:
            if batch := self._ready():
                return batch
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return []
            self._wake.clear()
            await self._wake.wait()

    async def whole_file(self) -> None:
        """Wait until all of the file is decoded; for ever where it is refused."""
        await self._incoming.whole()

    def _ready(self) -> list[Event]:
        if not self._incoming.is_whole:
            return []
        batch = self._events.pop(self._current, [])
        while self._current in self._done:
            self._current += 1
            batch += self._events.pop(self._current, [])
        return batch

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                first, index = await self._begin(), len(self._done)
                while (piece := await self._incoming.piece(index)) is not None:
                    group.create_task(self._hear(index, piece, first))
                    first, index = None, index + 1
        except* Exception as errors:
            self._error = _first_of(errors)
        self.heard = [self._done[index] for index in sorted(self._done)] if self._error is None else []
        self._has_ended = True
        self._wake.set()

    async def _read(self) -> None:
        with self.timing.within("decode"):
            await self._incoming.run()
        self._wake.set()

    async def _begin(self) -> tuple[PieceRequests, Detected] | None:
        """The first piece in which somebody speaks, from which the language is found out where it is not given; those
        before it are done, one after another: the language is the same however the pieces' answers come."""
        if self.language is not None or not self.ask.speech.languages:
            return None
        while (piece := await self._incoming.piece(index := len(self._done))) is not None:
            await self._turns.take()  # the piece's own, which the one that is returned keeps
            requests = await self._requests(index, piece)
            with self.timing.within("language"):
                detected, silence = await requests.detect()
            if not detected.is_silent:
                self.language = detected.language
                return requests, detected
            self._turns.give_back()
            self._end(index, Heard(piece, silence))
        return None

    async def _requests(self, index: int, piece: Piece) -> PieceRequests:
        with in_field(self._incoming.field), self.timing.within("features"):
            heard = await self._work.run_process(self.ask.speech.heard, piece, self._work.tenant)
        return PieceRequests(self._client, self.ask, index, heard)

    async def _hear(self, index: int, piece: Piece, first: tuple[PieceRequests, Detected] | None) -> None:
        if first is None:
            with self.timing.within("turns"):
                await self._turns.take()
        try:
            requests, detected = (await self._requests(index, piece), None) if first is None else first
            language = self.language
            if language is None and detected is None and self.ask.speech.languages:  # the first answer named none
                detected, silence = await requests.detect()
                language = detected.language
                if detected.is_silent:
                    self._end(index, Heard(piece, silence))
                    return
            with self.timing.within("engine"):
                attempt = await self._best(requests, language, None if detected is None else detected.no_speech)
            ends_s = await self._ends(requests, piece, attempt) if self.ask.has_words else ()
        finally:
            self._turns.give_back()
        self._end(index, Heard(piece, attempt, ends_s))

    def _end(self, index: int, heard: Heard) -> None:
        self._done[index] = heard
        self._wake.set()

    async def _best(self, requests: PieceRequests, language: str | None, no_speech: float | None) -> Attempt:
        """The first attempt that needs not be repeated, or the last; one that is live is the only one, and no judgement
        takes it back."""
        if self._is_live:
            return await self._attempt(requests, language, self.ask.temperatures[0])
        tells, wants = self.ask.speech.tells_silence, self.ask.wants_no_speech
        for temperature in self.ask.temperatures:
            is_asked = tells and no_speech is None
            attempt = await self._attempt(requests, language, temperature, asks_silence=is_asked and not wants)
            if is_asked and (wants or attempt.is_doubtful):
                said = attempt.no_speech
                no_speech = (await requests.detect())[0].no_speech if wants or said is None else said
            attempt = replace(attempt, no_speech=no_speech)
            if not attempt.should_be_repeated:
                break
        return attempt

    async def _ends(self, requests: PieceRequests, piece: Piece, attempt: Attempt) -> Sequence[float]:
        """When the tokens of an attempt were heard; the last one, behind which nothing is known, with the one before
        it."""
        speech, count = self.ask.speech, len(attempt.output.token_ids)
        if attempt.is_silence or count < 2:
            return [0.0] * count
        weights = await requests.align(attempt, self.language, speech.num_positions(piece))
        ends = await self._work.run_later(WARP_S_PER_CELL * weights.size, token_ends, weights, speech.timestamp_s)
        return [*ends, ends[-1]]

    async def _attempt(
        self, requests: PieceRequests, language: str | None, temperature: float, *, asks_silence: bool = False
    ) -> Attempt:
        choice = requests.choice(language, temperature, asks_silence=asks_silence)
        shown = replace(choice, request=replace(choice.request, asks=()))  # events that wait hold no features
        joint = self.ask.speech.joint(language) if requests.index else ""
        output, no_speech = CompletionOutput(0), None
        async for delta in requests.deltas(choice):
            if delta.prompt_logprobs is not None:
                no_speech = self.ask.speech.silence(choice.request.prompt_token_ids, delta.prompt_logprobs)
            if joint and delta.text:
                delta, joint = replace(delta, text=joint + delta.text), ""
            delta.add_to(output)
            if self._is_live:
                self._events[requests.index].append((shown, delta))
                self._wake.set()
        if not self.route.replica_id:
            self.route.replica_id = requests.place.replica_id
        said = self.ask.speech.text(output.token_ids, self.ask.model.tokenizer)
        text = output.text if self._is_live else self._between(requests, language, said)
        return replace(Attempt.of(choice.request, output, text, temperature), no_speech=no_speech)

    def _between(self, requests: PieceRequests, language: str | None, said: str) -> str:
        """Returns what is said, behind what stands between it and the piece before."""
        return self.ask.speech.joint(language) + said if requests.index and said else said

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._error = self._error or ClientDisconnected()
        self._wake.set()


def _first_of(errors: BaseExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
