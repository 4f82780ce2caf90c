"""POST /v1/chat/completions/batch: several conversations in one call, as vLLM has it; one choice each, in their order.

Each conversation is a chat request of its own through the app's own route, so every field means what it means there.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import JSONResponse

from app.api.body import describe_body, read_body
from app.api.endpoint import Endpoint
from app.api.errors import ClientDisconnected
from app.api.in_process import Answer, Post
from app.api.openai.closed import FirstFault
from app.config import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError

PATH = "/v1/chat/completions"


class ChatBatchRequest(FirstFault):
    """Body of POST /v1/chat/completions/batch: the fields of a chat, which hold for all of its conversations."""

    model_config = ConfigDict(frozen=True, extra="allow")
    refused: ClassVar[dict[str, str]] = {
        "stream": "answers come together",
        "prompt_logprobs": "see /v1/chat/completions",
        "use_beam_search": "see /v1/chat/completions",
    }

    messages: list[list[Any]] = Field(min_length=1, description="The conversations.")

    @model_validator(mode="after")
    def _refuse(self) -> ChatBatchRequest:
        for name in sorted(self.refused.keys() & (self.model_extra or {}).keys()):
            if (self.model_extra or {})[name] not in (None, False):
                raise UnsupportedError(f"{name}: {self.refused[name]}", param=name)
        return self


class _BadAnswer(Exception):
    """A conversation that is refused or fails; the others end with it."""

    def __init__(self, number: int, answer: Answer) -> None:
        self.number = number
        self.answer = answer


def chat_batch_routes(limits: RequestLimits, post: Post) -> APIRouter:
    """The endpoint; `post` asks the app itself."""
    router = APIRouter(tags=["openai"])

    @router.post(f"{PATH}/batch", openapi_extra=describe_body(ChatBatchRequest))
    async def create_chat_completions(request: Request) -> JSONResponse:
        """Answer several conversations: one answer whose choices are theirs, in their order."""
        body = await read_body(request, ChatBatchRequest)
        if len(body.messages) > limits.max_prompts:
            number, most = len(body.messages), limits.max_prompts
            raise InvalidRequestError(f"{number} conversations; at most {most}", param="messages")
        asked = [{**(body.model_extra or {}), "messages": messages} for messages in body.messages]
        calls: list[Awaitable[Answer]] = [post(PATH, json.dumps(one).encode(), request.state.tenant) for one in asked]
        try:
            return JSONResponse(_merged([answer.body for answer in await _while_there(request, calls)]))
        except _BadAnswer as bad:
            return JSONResponse(_fault(bad.answer.body, bad.number), bad.answer.status)

    return router


async def _while_there(request: Request, calls: Sequence[Awaitable[Answer]]) -> list[Answer]:
    """The answers of all calls; the first bad one ends the others, and so does the client when it leaves."""
    tasks: list[asyncio.Future[Answer]] = [asyncio.ensure_future(call) for call in calls]
    watcher = asyncio.ensure_future(_leaves(request))
    everything: list[asyncio.Future[Any]] = [*tasks, watcher]
    try:
        pending = set(everything)
        while not all(task.done() for task in tasks):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if watcher in done:
                raise ClientDisconnected
            for number, task in enumerate(tasks):
                if task in done and task.result().status != 200:
                    raise _BadAnswer(number, task.result())
        return [task.result() for task in tasks]
    finally:
        for future in everything:
            future.cancel()
        await asyncio.gather(*everything, return_exceptions=True)


async def _leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault(body: Any, number: int) -> Any:
    """An error of one conversation, its field named as it stands in the batch."""
    if isinstance(body, dict) and str(body.get("error", {}).get("param") or "").startswith("messages"):
        body["error"]["param"] = f"messages.{number}{body['error']['param'].removeprefix('messages')}"
    return body


def _merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    choices = [choice for answer in answers for choice in answer["choices"]]
    counts: Counter[str] = Counter()
    num_cached = 0
    for answer in answers:
        usage = answer["usage"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        counts.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")})
    usage = {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}}
    return answers[0] | {"choices": [{**c, "index": i} for i, c in enumerate(choices)], "usage": usage}


ENDPOINT = Endpoint(lambda api: chat_batch_routes(api.limits, api.post), (ChatBatchRequest,))
