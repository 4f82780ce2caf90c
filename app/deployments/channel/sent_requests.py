"""Writes requests and the refusals of them as msgpack, and reads them: no objects are read off a socket.

What requests of one message share - a prompt, its `work`, a record in `asks` - comes once, is read once, and is shared
where they arrive: `n` choices cost little more than one. A request that brings pixels, a sound, or anything that stands
in no table here has no such form.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import ValidationError

import app.errors
from app.deployments.channel.wire import PixelsGoneError, SecludedError
from app.errors import MantaError, OverloadedError
from app.records.adapter import AdapterAsk
from app.records.alignment_ask import AlignmentAsk
from app.records.bad_words import BadWords
from app.records.bundle import Bundle
from app.records.late_interaction import ExpandedQuery
from app.records.message_borders import MessageBorders
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest, Placement
from app.records.sampling_params import SamplingParams
from app.records.thinking_budget import ThinkingBudget
from app.structured.reasoning import ReasoningSpan

MAX_REQUESTS_BYTES = 64 << 20  # of one message; longer ones take another way

Work = SamplingParams | PoolingParams

_WORK: tuple[type[Work], ...] = (SamplingParams, PoolingParams)
# Append only: the index of a type is its name.
_ASKS = (
    *(AdapterAsk, AlignmentAsk, BadWords, Bundle, ExpandedQuery),
    *(MessageBorders, ReasoningSpan, ThinkingBudget),
)
_ASK_DECODERS = tuple(msgspec.msgpack.Decoder(kind) for kind in _ASKS)
_ASK_INDEX = {kind: index for index, kind in enumerate(_ASKS)}
_REFUSALS: dict[str, type[MantaError]] = {
    kind.__name__: kind
    for kind in (*vars(app.errors).values(), PixelsGoneError, SecludedError)
    if isinstance(kind, type) and issubclass(kind, MantaError)
}


class _Request(msgspec.Struct, array_like=True):
    """An EngineRequest, field by field, for a stream. `prompt`, `work` and `asks` are places in the message's lists."""

    stream_id: str
    prompt: int
    request_id: str
    work: int
    choice_index: int
    placement: Placement
    arrival_time: float
    asks: list[int]
    output_token_ids: list[int]
    settled_by: bytes


class _Requests(msgspec.Struct, array_like=True):
    prompts: list[list[int]]
    works: list[tuple[int, dict[str, Any]]]  # kind, and what was set
    asks: list[tuple[int, msgspec.Raw]]
    requests: list[_Request]


class _Refusal(msgspec.Struct, array_like=True):
    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class _Shared:
    """Lists things, each once, by identity: it keeps them alive."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._places: dict[int, int] = {}

    def place(self, thing: object) -> int:
        """Its place in the list, where it is put if it is not there yet."""
        place = self._places.setdefault(id(thing), len(self.things))
        if place == len(self.things):
            self.things.append(thing)
        return place


_encode = msgspec.msgpack.Encoder().encode
_decode_requests = msgspec.msgpack.Decoder(_Requests).decode
_decode_refusals = msgspec.msgpack.Decoder(list[_Refusal | None]).decode


def encode_requests(requests: list[tuple[str, EngineRequest]]) -> bytes | None:
    """Msgpack bytes of requests with their stream ids; None where one of them has no such form."""
    prompts, works, asks = _Shared(), _Shared(), _Shared()
    sent = [
        _Request(
            stream_id,
            prompts.place(one.prompt_token_ids),
            one.request_id,
            works.place(one.work),
            one.choice_index,
            one.placement,
            one.arrival_time,
            [asks.place(ask) for ask in one.asks],
            one.output_token_ids,
            one.settled_by,
        )
        for stream_id, one in requests
    ]
    try:
        sent_works = [(_WORK.index(type(work)), work.model_dump(exclude_unset=True)) for work in works.things]
        sent_asks = [(_ASK_INDEX[type(ask)], msgspec.Raw(_encode(ask))) for ask in asks.things]
        data = _encode(_Requests(prompts.things, sent_works, sent_asks, sent))
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return data if len(data) <= MAX_REQUESTS_BYTES else None


def decode_requests(data: bytes) -> list[tuple[str, EngineRequest]]:
    """The requests with their stream ids. ValueError when these are no such bytes, or hold what is not known here."""
    try:
        message = _decode_requests(data)
        works = [_WORK[kind].model_validate(work) for kind, work in message.works]
        asks = [_ASK_DECODERS[kind].decode(ask) for kind, ask in message.asks]
        return [(one.stream_id, _read(one, message.prompts, works, asks)) for one in message.requests]
    except (msgspec.MsgspecError, ValidationError, IndexError, MantaError) as error:
        raise ValueError(f"requests that cannot be read: {_about(error)}") from error


def encode_refusals(refusals: list[MantaError | None]) -> bytes:
    """Msgpack bytes of what a replica says of each request: None, or why not."""
    return _encode([None if one is None else _refusal(one) for one in refusals])


def decode_refusals(data: bytes) -> list[MantaError | None]:
    """Those again; msgspec's error when these are no such bytes."""
    return [None if one is None else _error(one) for one in _decode_refusals(data)]


def _read(one: _Request, prompts: list[list[int]], works: list[Work], asks: list[object]) -> EngineRequest:
    return EngineRequest(
        one.request_id,
        prompts[one.prompt],
        works[one.work],
        one.choice_index,
        one.placement,
        one.arrival_time,
        tuple(asks[place] for place in one.asks),
        one.output_token_ids,
        one.settled_by,
    )


def _about(error: Exception) -> str:
    """Says what is wrong without what a client sent: it goes into a log."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)
        return ", ".join(sorted({f"{(*each['loc'], 'all')[0]}: {each['type']}" for each in found}))
    return f"{error.param}: refused" if isinstance(error, MantaError) else str(error)


def _refusal(error: MantaError) -> _Refusal:
    """A kind that the other end may not know travels as the nearest one that it does."""
    kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _REFUSALS)
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    return _Refusal(kind, error.message, error.param, retry_after_s)


def _error(one: _Refusal) -> MantaError:
    kind = _REFUSALS.get(one.kind, MantaError)
    if issubclass(kind, OverloadedError) and one.retry_after_s is not None:
        return kind(one.message, param=one.param, retry_after_s=one.retry_after_s)
    return kind(one.message, param=one.param)
