"""Responses over a websocket: the message that asks for one, and the responses that later messages may continue.

A socket remembers the last response of each of its streams, whether or not the store keeps it: what is asked with
`store: false` can be continued on its own socket, and nowhere else. The bytes count as those of bodies in flight do.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request
from pydantic import Field, model_validator

from app.api.http.body import read_body
from app.api.http.held_bytes import Holding
from app.api.http.socket_posts import ECHOED
from app.api.http.sockets import SocketState, socket_of
from app.api.openai.responses_protocol import ResponsesRequest
from app.errors import InvalidRequestError

MAX_STREAMS = 8  # of a socket, whose last responses are remembered

Keep = Callable[[str, dict[str, Any], bytes], Awaitable[object]]  # for a tenant a response and what it was asked


class ResponseCreate(ResponsesRequest):
    """A message on a websocket of /v1/responses: the body of a POST, and what is said of the message itself."""

    type: Literal["response.create"] = Field(description="Only response.create.")
    generate: bool = Field(True, description="False: check and remember the conversation, and generate nothing.")
    stream_id: str | None = Field(
        None, min_length=1, description="Repeated in the events; names the stream whose last response is remembered."
    )

    @model_validator(mode="before")
    @classmethod
    def _is_streamed(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("stream") is False:
            raise InvalidRequestError("a websocket brings events only: leave it out", param="stream")
        if data.get("background"):
            raise InvalidRequestError("is not possible over a websocket: send a POST", param="background")
        return {**data, "stream": True}

    @property
    def generates(self) -> bool:
        """True if the model is to answer."""
        return self.generate


async def read_request(request: Request) -> ResponsesRequest:
    """The body of a POST, or the message of a websocket."""
    if socket_of(request) is None:
        return await read_body(request, ResponsesRequest)
    body = await read_body(request, ResponseCreate)
    if body.stream_id is not None:
        setattr(request.state, ECHOED, {"stream_id": body.stream_id})
    return body


def stream_of(body: ResponsesRequest) -> str:
    """The stream of a message; the empty one where it names none."""
    return (body.stream_id or "") if isinstance(body, ResponseCreate) else ""


@dataclass(slots=True, frozen=True)
class _Recent:
    """The last response of a stream, with the conversation that it ends: what was asked and answered, by turns."""

    response_id: str
    parts: tuple[bytes, ...]
    holding: Holding


class RecentResponses:
    """Those of one websocket. A conversation is bounded as if it had come in one body."""

    def __init__(self, state: SocketState) -> None:
        self._state = state
        self._of_stream: OrderedDict[str, _Recent] = OrderedDict()
        self.continued: tuple[bytes, ...] = ()  # the conversation that the response under way continues

    def parts(self, response_id: str | None) -> tuple[bytes, ...] | None:
        """The conversation that a response ends; None where the socket does not remember it."""
        found = [recent.parts for recent in self._of_stream.values() if recent.response_id == response_id]
        return found[0] if found else None

    def keeper(self, stream: str) -> Keep:
        """Returns the call that remembers a stream's response, in place of the one before it."""

        async def keep(tenant: str, response: dict[str, Any], asked: bytes) -> None:
            parts = (*self.continued, asked, json.dumps(response).encode())
            self._forget(stream)
            num_bytes, holding = sum(map(len, parts)), Holding(self._state.held, tenant)
            if num_bytes <= self._state.max_bytes and holding.grow(num_bytes):
                self._of_stream[stream] = _Recent(response["id"], parts, holding)
            if len(self._of_stream) > MAX_STREAMS:
                self._forget(next(iter(self._of_stream)))

        return keep

    def clear(self) -> None:
        """Forget all."""
        for stream in list(self._of_stream):
            self._forget(stream)

    def _forget(self, stream: str) -> None:
        if (recent := self._of_stream.pop(stream, None)) is not None:
            recent.holding.release()


def recent_of(request: Request) -> RecentResponses | None:
    """Returns what the websocket remembers that a request came by; None where it came by itself."""
    state = socket_of(request)
    if state is None:
        return None
    if not isinstance(state.memory, RecentResponses):
        state.memory = RecentResponses(state)
    return state.memory
