"""The choices of one HTTP request as one stream of events, whatever the dialect.

Each choice is pulled from the engine by a task of its own, as many at a time as leave room to others; whoever writes
takes everything that is ready at once.
Leaving the stream early closes the engine's iterators, which aborts what still runs. A writer that does not keep up
stops the pulling, so that a slow client holds only its own request (I9).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Self

from starlette.types import Receive

from app.api.engine_client import EngineClient, PromptPlace, RouteInfo
from app.api.generation.stream_interval import Gatherer
from app.api.http.errors import ClientDisconnected, renamed
from app.errors import EngineDeadError, InvalidRequestError, MantaError
from app.records.outputs import CompletionOutput, EngineOutput
from app.records.request import EngineRequest
from app.records.step import TokenLogprobs
from app.text.output_processor import OutputProcessor, TextDelta

ENDED_BY = "finish_reason"  # in RouteInfo.extra: how a request ended here that the engine still runs
_OWN_NAMES: Mapping[str, str] = MappingProxyType({})
MAX_READY = 256  # events that may wait for the writer before pulling stops


@dataclass(slots=True)
class Choice:
    """One of the answers that a request asked for."""

    index: int  # among all choices of the response
    prompt_index: int
    request: EngineRequest
    processor: OutputProcessor


Event = tuple[Choice, TextDelta]


class EventStream:
    """Use as `async with`; leaving it ends whatever still runs."""

    def __init__(
        self,
        client: EngineClient,
        model: str,
        choices: Sequence[Choice],
        receive: Receive,
        names: Mapping[str, str] = _OWN_NAMES,  # what the dialect calls our fields, for errors
        interval: int = 1,  # tokens that one event gathers, of a choice
    ) -> None:
        self.choices = list(choices)
        self._places = {choice.prompt_index: PromptPlace() for choice in self.choices}
        self.route = self._new_route(self.choices[0])
        self._client = client
        self._model = model
        self._receive = receive
        self._names = names
        self._interval = interval
        self._ready: list[Event] = []
        self._error: Exception | None = None
        self._num_open = len(self.choices)
        self._waiter: asyncio.Future[None] | None = None  # of whoever writes, until something is ready
        self._room = asyncio.Event()
        served = client.models[model]
        self._turns = asyncio.Semaphore(served.max_running)
        self._prompt_turns = {index: asyncio.Semaphore(served.max_running_of_prompt) for index in self._places}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pull(choice)) for choice in self.choices]
        self._tasks.append(asyncio.create_task(self._watch_client()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next_batch(self) -> list[Event]:
        """Every event that is ready, at least one; [] once all choices have ended.

        Raises what the engine raised (after the events before it), and ClientDisconnected.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._num_open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        batch, self._ready = self._ready, []
        self._room.set()
        return batch

    async def _pull(self, choice: Choice) -> None:
        async with self._prompt_turns[choice.prompt_index], self._turns:
            await self._pull_now(choice)

    async def _pull_now(self, choice: Choice) -> None:
        # The first choice's route is the response's; each has its own, for its own end.
        route = self.route if choice.index == 0 else self._new_route(choice)
        outputs = self._client.generate(self._model, choice.request, route)
        try:
            await self._pull_from(outputs, choice, route)
        except InvalidRequestError as error:
            self._fail(renamed(error, self._names))
        except Exception as error:
            self._fail(error)
        finally:
            self._num_open -= 1
            self._wake()
            await close_outputs(outputs)

    def _new_route(self, choice: Choice) -> RouteInfo:
        return RouteInfo(place=self._places[choice.prompt_index])

    async def _pull_from(self, outputs: AsyncIterator[EngineOutput], choice: Choice, route: RouteInfo) -> None:
        gatherer = Gatherer(self._interval) if self._interval > 1 else None
        async for output in outputs:
            delta = choice.processor.process(output)
            if delta.finish_reason == "error":
                raise output.as_error()
            gathered = gatherer.push(delta) if gatherer is not None else delta
            if gathered is None:
                continue
            self._ready.append((choice, gathered))
            self._wake()
            if delta.finish_reason is not None:
                if delta.must_abort:
                    route.extra[ENDED_BY] = delta.finish_reason
                return
            while len(self._ready) >= MAX_READY:
                self._room.clear()
                await self._room.wait()
        raise EngineDeadError("the engine ended the request without a finish reason")

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._ready.clear()
        self._fail(ClientDisconnected())

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        """Something has happened. A future of each wait takes half of what an Event does, for every token."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def close_outputs(outputs: AsyncIterator[EngineOutput]) -> None:
    """Close an engine iterator: that aborts a request which still runs."""
    close = getattr(outputs, "aclose", None)
    if close is not None:
        with contextlib.suppress(MantaError):
            await close()


@dataclass(slots=True)
class Collected:
    """One choice, read to its end."""

    choice: Choice
    output: CompletionOutput
    text_offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None


async def collect(stream: EventStream) -> list[Collected]:
    """Read a stream to its end: one entry per choice, in order. Raises what the engine raised."""
    collected = [Collected(choice, CompletionOutput(choice.index)) for choice in stream.choices]
    async with stream:
        while batch := await stream.next_batch():
            for choice, delta in batch:
                entry = collected[choice.index]
                delta.add_to(entry.output)
                entry.text_offsets += delta.text_offsets or ()
                entry.prompt_logprobs = delta.prompt_logprobs or entry.prompt_logprobs
    return collected
