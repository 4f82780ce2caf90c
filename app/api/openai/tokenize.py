"""POST /tokenize and /detokenize: exactly what the server does with a prompt, a conversation or token ids."""

from __future__ import annotations

from typing import Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from app.api.chat.messages import ChatMessage, ChatOptions
from app.api.chat.prompt import render_chat
from app.api.chat.tools import AnyTool
from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import check_total_chars, counting_room, decode, encode, find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import JSONResponse
from app.api.http.strict_models import StrictModel
from app.api.http.work_pool import RequestWork, work_of
from app.bounds import Items, JsonObject, Text, TokenIds
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.text.served_model import ServedModel


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a prompt, or the fields of a chat."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    prompt: Text | None = Field(None, description="A text.")
    messages: Items[ChatMessage] | None = Field(None, min_length=1, description="A conversation instead of a text.")
    tools: Items[AnyTool] | None = Field(None, description="Tools the model may call.")
    add_generation_prompt: bool = Field(True, description="End the prompt where the assistant's turn begins.")
    continue_final_message: bool = Field(False, description="Leave the last message open.")
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for a chat.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Further names for the template.")
    return_token_strs: bool = Field(False, description="Add the text of each token.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="Which model; the server's first one when not given.")
    tokens: TokenIds = Field(description="Token ids.")
    skip_special_tokens: bool = Field(False, description="Leave special tokens out of the text.")


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
