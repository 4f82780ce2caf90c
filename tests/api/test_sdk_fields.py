"""Every field that the SDKs' types have is read, or known by name with a reason: their newest versions are the judge.

The test runs with the versions that are installed; those of a folder with newer ones are told by PYTHONPATH.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import anthropic
import openai
import pytest
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.resources import responses
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    upload_complete_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat import completion_update_params
from openai.types.responses import input_token_count_params, response_create_params
from pydantic import BaseModel

from app.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from app.api.batches.batch import BatchBody
from app.api.batches.upload_store import CompleteBody, UploadBody
from app.api.chat.chat_request import ChatRequest
from app.api.http.strict_models import StrictModel
from app.api.openai.completions import CompletionRequest
from app.api.openai.responses_protocol import InputTokensRequest, ResponsesRequest
from app.api.openai.stored_chats import CompletionUpdate
from app.api.pooling.protocol import EmbeddingRequest

PAIRS: list[tuple[Any, type[BaseModel]]] = [
    (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
    (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    (response_create_params.ResponseCreateParamsStreaming, ResponsesRequest),
    (input_token_count_params.InputTokenCountParams, InputTokensRequest),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
    (batch_create_params.BatchCreateParams, BatchBody),
    (upload_create_params.UploadCreateParams, UploadBody),
    (upload_complete_params.UploadCompleteParams, CompleteBody),
    (completion_update_params.CompletionUpdateParams, CompletionUpdate),
    (message_create_params.MessageCreateParamsStreaming, MessagesRequest),
    (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    (beta_create_params.MessageCreateParamsStreaming, MessagesRequest),
    (beta_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
]


def sdk_fields(typed_dict: Any) -> dict[str, Any]:
    return typing.get_type_hints(typed_dict)


def known(model: type[BaseModel]) -> set[str]:
    names = set(model.model_fields) | {field.alias or "" for field in model.model_fields.values()}
    return names | set(getattr(model, "refused", ())) | set(getattr(model, "ignored", ()))


def members(annotation: Any) -> Iterator[Any]:
    """What a type consists of, unions and lists and aliases taken apart."""
    if isinstance(annotation, typing_extensions.TypeAliasType):
        yield from members(annotation.__value__)
    elif get_args(annotation) and get_origin(annotation) is not Literal:
        for argument in get_args(annotation):
            yield from members(argument)
    else:
        yield annotation


def tags(hints: Any) -> set[str]:
    """The values of the field `type`, by which the members of a union are told apart."""
    found = {value for kind in members(hints.get("type")) for value in get_args(kind)}
    return {value for value in found if isinstance(value, str)}


def nested(typed_dict: Any, model: type[BaseModel]) -> Iterator[tuple[Any, type[BaseModel]]]:
    """Objects within both that stand for each other: the only ones of a field, or those of one tag."""
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for name, hint in sdk_fields(typed_dict).items():
        dicts = [kind for kind in members(hint) if typing_extensions.is_typeddict(kind)]
        models = [kind for kind in members(fields.get(name)) if inspect.isclass(kind) and issubclass(kind, StrictModel)]
        for each in dicts:
            for ours in models:
                theirs = tags(sdk_fields(each))
                own = tags({key: field.annotation for key, field in ours.model_fields.items()})
                if theirs & own or not own or not theirs:
                    yield each, ours


def unknown(typed_dict: Any, model: type[BaseModel], path: str, seen: set[Any]) -> Iterator[str]:
    if (typed_dict, model) in seen:
        return
    seen.add((typed_dict, model))
    yield from (f"{path}.{name}" for name in sorted(set(sdk_fields(typed_dict)) - known(model)))
    for each, ours in nested(typed_dict, model):
        yield from unknown(each, ours, f"{path}/{each.__name__}", seen)


@pytest.mark.parametrize(("typed_dict", "model"), PAIRS, ids=[f"{t.__module__}-{m.__name__}" for t, m in PAIRS])
def test_no_field_is_unknown(typed_dict: Any, model: type[BaseModel]) -> None:
    seen: set[Any] = set()
    assert list(unknown(typed_dict, model, model.__name__, seen)) == []
    if model in (ChatRequest, ResponsesRequest, MessagesRequest):
        assert len(seen) > 4, "nested objects are compared, too"


def test_arguments_of_methods_are_known() -> None:
    """Some stand in no type of parameters: they are arguments of the SDK's methods alone."""
    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout", "text_format", "starting_after"}
    methods: list[tuple[Any, type[BaseModel]]] = [
        (openai.resources.chat.Completions.create, ChatRequest),
        (openai.resources.Completions.create, CompletionRequest),
        (responses.Responses.create, ResponsesRequest),
        (responses.InputTokens.count, InputTokensRequest),
        (anthropic.resources.Messages.create, MessagesRequest),
        (anthropic.resources.beta.Messages.create, MessagesRequest),
        (anthropic.resources.beta.Messages.count_tokens, CountTokensRequest),
    ]
    for method, model in methods:
        given = set(inspect.signature(inspect.unwrap(method)).parameters) - transport
        assert given - known(model) == set(), method


def test_a_reason_stands_for_each_field_that_is_not_read() -> None:
    for model in {model for _, model in PAIRS}:
        for table in ("refused", "ignored"):
            for name, why in getattr(model, table, {}).items():
                assert len(why) > 8, (model, name)
        both = set(getattr(model, "refused", ())) & set(getattr(model, "ignored", ()))
        assert not both, (model, both)
        assert not set(getattr(model, "ignored", ())) & set(model.model_fields), model


def test_the_walk_would_see_a_new_field() -> None:
    class Inner(typing_extensions.TypedDict, total=False):
        type: Literal["function"]
        fresh: str

    class Outer(typing_extensions.TypedDict, total=False):
        tools: list[Inner]

    class OurTool(StrictModel):
        type: Literal["function"]

    class Ours(StrictModel):
        tools: list[OurTool]

    Outer.__annotations__["tools"] = list[Inner]
    Inner.__annotations__.update(type=Literal["function"], fresh=str)
    assert list(unknown(Outer, Ours, "x", set())) == ["x/Inner.fresh"]
