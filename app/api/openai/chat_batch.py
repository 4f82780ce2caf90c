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
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import check_number, find_model
from app.api.http.body import describe_body, read_body
from app.api.http.errors import BodyTooLargeError, ClientDisconnected
from app.api.http.in_process import Answer, Post
from app.api.http.json_response import JSONResponse, json_response
from app.api.http.strict_models import FirstFault
from app.api.http.work_pool import PARSE_S_PER_BYTE, WRITE_S_PER_LOGPROB, work_of
from app.bounds import Count, Items
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError

PATH = "/v1/chat/completions"


class ChatBatchRequest(FirstFault):
    """Body of POST /v1/chat/completions/batch: the fields of a chat, which hold for all of its conversations."""

    model_config = ConfigDict(frozen=True, extra="allow")
    refused: ClassVar[dict[str, str]] = {
        "stream": "answers come together",
        "prompt_logprobs": "see /v1/chat/completions",
        "store": "one answer of several is not kept; see /v1/chat/completions",
        "use_beam_search": "see /v1/chat/completions",
    }

    messages: Items[Items[Any]] = Field(min_length=1, description="The conversations.")
    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    n: Count | None = Field(None, ge=1, description="Choices of each conversation; 1 when not given.")

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


def chat_batch_routes(client: EngineClient, limits: RequestLimits, post: Post) -> APIRouter:
    """The endpoint over `client`'s models; `post` asks the app itself."""
    router = APIRouter(tags=["openai"])

    @router.post(f"{PATH}/batch", openapi_extra=describe_body(ChatBatchRequest))
    async def create_chat_completions(request: Request) -> Response:
        """Answer several conversations: one answer whose choices are theirs, in their order."""
        body = await read_body(request, ChatBatchRequest)
        shared = await _shared_fields(request, body, limits)
        turns = asyncio.Semaphore(max(1, find_model(client, body.model).max_running // (body.n or 1)))

        async def ask(messages: list[Any]) -> Answer:
            async with turns:  # one body leaves rows to others, whether its choices are of one conversation or of many
                cost_s = PARSE_S_PER_BYTE * request.state.num_body_bytes / len(body.messages)
                payload = await work_of(request).run(cost_s, _payload, messages, shared)
                return await post(PATH, payload, request.state.tenant)

        try:
            found = await _while_there(request, [ask(one) for one in body.messages])
        except _BadAnswer as bad:
            return JSONResponse(_fault(bad.answer.body, bad.number), bad.answer.status)
        cost_s = PARSE_S_PER_BYTE * sum(len(answer.raw) for answer in found)
        answers = await work_of(request).run(cost_s, lambda: [answer.body for answer in found])
        return await work_of(request).run(_merging_cost_s(answers), _merged, answers)

    return router


async def _shared_fields(request: Request, body: ChatBatchRequest, limits: RequestLimits) -> bytes:
    """Writes what holds for all conversations, as JSON. InvalidRequestError where they are too many, or too much
    together.
    """
    number = len(body.messages)
    if number > limits.max_prompts:
        raise InvalidRequestError(f"{number} conversations; at most {limits.max_prompts}", param="messages")
    check_number(number, body.n or 1, limits, {"prompt": "messages"})
    fields = {**(body.model_extra or {}), "model": body.model, "n": body.n}
    cost_s = PARSE_S_PER_BYTE * request.state.num_body_bytes
    shared = await work_of(request).run(cost_s, lambda: json.dumps(fields).encode())
    if number * len(shared) > limits.max_body_bytes:
        what = f"{number} conversations with {len(shared)} bytes of other fields for each; together at most"
        raise BodyTooLargeError(f"{what} {limits.max_body_bytes} bytes", param="messages")
    return shared


def _payload(messages: list[Any], shared: bytes) -> bytes:
    return b'{"messages": %b, %b' % (json.dumps(messages).encode(), shared[1:])


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


def _merging_cost_s(answers: Sequence[dict[str, Any]]) -> float:
    """Estimate of the time that writing the answers as one takes, for a WorkPool."""
    number = 0
    for answer in answers:
        for choice in answer["choices"]:
            entries = (choice["logprobs"] or {}).get("content") or ()
            number += 1 + sum(1 + len(entry["top_logprobs"]) for entry in entries[:1]) * len(entries)
    return WRITE_S_PER_LOGPROB * number


def _merged(answers: Sequence[dict[str, Any]]) -> Response:
    choices = [_with_prompt(choice, answer) for answer in answers for choice in answer["choices"]]
    counts: Counter[str] = Counter()
    drafts: Counter[str] = Counter()
    num_cached = 0
    for answer in answers:
        usage = answer["usage"]
        num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        drafts.update(usage.get("completion_tokens_details", {}))
        counts.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")})
    usage = {**counts, "prompt_tokens_details": {"cached_tokens": num_cached}}
    usage |= {"completion_tokens_details": dict(drafts)} if drafts else {}
    own = {"choices": [{**c, "index": i} for i, c in enumerate(choices)], "usage": usage, "prompt_token_ids": None}
    return json_response(answers[0] | own)


def _with_prompt(choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """The choice with the prompt that it answers, where token ids are asked for: each conversation has its own."""
    prompt = answer["prompt_token_ids"]
    return choice if prompt is None else {**choice, "prompt_token_ids": prompt}


ENDPOINT = Endpoint(
    lambda api: chat_batch_routes(api.client, api.limits, api.post), (ChatBatchRequest,), generating=(f"{PATH}/batch",)
)
