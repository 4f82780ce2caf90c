"""POST /tokenize and /detokenize: exactly what the server does with a prompt, a conversation or token ids."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.api.chat.messages import ChatOptions
from app.api.chat.prompt import render_chat
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import check_total_chars, counting_room, decode, encode, find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.work_pool import RequestWork, work_of
from app.api.openai.protocol import DetokenizeRequest, TokenizeRequest
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.text.served_model import ServedModel


def tokenize_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The tokenizer endpoints over `client`'s models."""
    router = APIRouter(tags=["tokenizer"])

    @router.post("/tokenize", openapi_extra=describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> JSONResponse:
        """Token ids of a prompt, or of a conversation rendered as chat would render it."""
        body = await read_body(request, TokenizeRequest)
        model = find_model(client, body.model)
        token_ids = await prompt_token_ids(work_of(request), body, model, limits)
        answer = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = [model.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return JSONResponse(answer)

    @router.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> JSONResponse:
        """Text of token ids."""
        body = await read_body(request, DetokenizeRequest)
        model = find_model(client, body.model)
        for token_id in body.tokens:
            if not 0 <= token_id < model.info.vocab_size:
                raise InvalidRequestError(
                    f"token ids must be from 0 to {model.info.vocab_size - 1}, not {token_id}", param="tokens"
                )
        text = await decode(work_of(request), model.tokenizer, body.tokens, body.skip_special_tokens)
        return JSONResponse({"prompt": text})

    return router


async def prompt_token_ids(
    work: RequestWork, body: TokenizeRequest, model: ServedModel, limits: RequestLimits
) -> list[int]:
    """Token ids of the body's prompt or conversation."""
    room = counting_room(model, "prompt" if body.messages is None else "messages")
    if body.prompt is not None:
        check_total_chars(len(body.prompt), limits, room.field)
        return (await encode(work, model.tokenizer, [body.prompt], body.add_special_tokens is not False, room))[0]
    assert body.messages is not None  # the body holds one of the two
    options = ChatOptions(
        messages=body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=bool(body.add_special_tokens),
        documents=None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return (await render_chat(work, model, options, limits, room)).token_ids


ENDPOINT = Endpoint(
    lambda api: tokenize_routes(api.client, api.limits),
    (
        TokenizeRequest,
        DetokenizeRequest,
    ),
)
