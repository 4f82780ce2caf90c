"""The base of all users: asks for a chat completion and times the chunks of the stream as they arrive.

An answer counts as a failure unless it is whole: status 200, no error event, a finish reason, usage and `[DONE]`.
The client shares its machine with the server under test, so the loop does little: it splits lines off the socket's
buffer, stamps the clock and parses one small JSON object a chunk.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, FastHttpUser, ResponseContextManager

from loadtest.answer import AnswerReader, BrokenAnswerError
from loadtest.record import AnswerRecord
from loadtest.server import authorization

Message = dict[str, str]
PATH = "/v1/chat/completions"


class StreamingUser(FastHttpUser):
    """A user that streams. Subclasses set `kind`, the name of their rows in the statistics."""

    abstract = True
    kind = "chat"
    network_timeout = 300.0

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self.random = random.Random()
        self.options = environment.parsed_options

    def ask(self, messages: list[Message], kind: str | None = None) -> str:
        """Stream one answer, record it under `kind` (the user's own by default), return its text ("" on failure)."""
        record = AnswerRecord(kind or self.kind, time.time())
        begin = time.perf_counter()
        text = ""
        with self.client.post(
            PATH,
            data=json.dumps(self._body(messages)),
            headers={"Content-Type": "application/json", **authorization(self.options.api_key)},
            name=record.kind,
            stream=True,
            catch_response=True,
            context={"record": record},
        ) as response:
            try:
                text = _read_answer(response, record, begin)
                response.success()
            except (BrokenAnswerError, *FAILURE_EXCEPTIONS) as error:
                record.error = str(error) or type(error).__name__
                response.failure(record.error)
            record.total_s = time.perf_counter() - begin
            response.request_meta["response_time"] = 1e3 * record.total_s
        return text if record.error is None else ""

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.options.model,
            "messages": messages,
            "max_tokens": self.options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.options.ignore_eos:
            body["ignore_eos"] = True
        return body


def _read_answer(response: ResponseContextManager, record: AnswerRecord, begin: float) -> str:
    """Fill the record from the stream and return the text; BrokenAnswerError says what is wrong."""
    if response.status_code != 200:
        error = getattr(response, "error", None)
        reason = (
            f"status {response.status_code}: {(response.text or '')[:200]}" if response.status_code else repr(error)
        )
        raise BrokenAnswerError(reason)
    reader = AnswerReader(record, begin)
    for data in _events(response):
        reader.push(data, time.perf_counter())
    return reader.finish()


def _events(response: ResponseContextManager) -> Iterator[bytes]:
    """The data of each server-sent event, as it arrives; reads to the end, so that the connection can be reused."""
    stream = response._response
    assert stream is not None
    while line := stream.readline(b"\n"):
        if line.startswith(b"data:"):
            yield bytes(line[5:]).strip()
