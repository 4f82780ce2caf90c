"""POST /v2/embed and /v1/embed, as Cohere's clients ask for vectors. Their rerank is a path of score.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import check_total_chars, find_model
from app.api.http.body import describe_body, read_body
from app.api.http.json_response import json_response
from app.api.http.strict_models import StrictModel
from app.api.http.work_pool import work_of
from app.api.pooling.answer import meta_of, new_id
from app.api.pooling.protocol import PooledBody
from app.api.pooling.run import pool
from app.api.pooling.texts import pooling_of, prompted, tokenise
from app.api.pooling.vector_forms import VectorForm, in_form
from app.bounds import Count, Items, Text
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError, UnsupportedError
from app.records.pooling_params import PoolingParams
from app.records.step import Float32Array
from app.text.prompt_size import TextRoom
from app.text.served_model import ServedModel

_INPUT_TYPE = (
    "`search_query`, `search_document`, `classification`, `clustering`, or the name of a prompt: the model's prompt "
    "for it, if any, goes before each text."
)
_FORMS = (
    "Forms of each vector. `int8` and `uint8`: whole numbers, of which a vector's largest is 127 (less 128 in "
    "`uint8`); `binary` and `ubinary`: signs, eight to a byte; `base64`: the fp32 numbers' bytes."
)
_KEEPS: dict[str, Literal["all", "first", "last"]] = {"NONE": "all", "END": "first", "START": "last"}


class TextPart(StrictModel):
    """A text of an input."""

    type: Literal["text"]
    text: Text


class EmbedInput(StrictModel):
    """An input made of parts."""

    content: Items[TextPart] = Field(min_length=1)


class CohereBody(PooledBody):
    """Holds what both versions of the endpoint have."""

    refused: ClassVar[Mapping[str, str]] = {"images": "pictures are not embedded: send texts"}

    texts: Items[Text] | None = Field(None, description="What to embed.")
    truncate: Literal["NONE", "START", "END"] = Field(
        "END", description="Which end a text loses that is too long; `NONE`: it is refused."
    )

    def given(self) -> tuple[str, list[str]]:
        """The field that holds the texts, and those."""
        return "texts", list(self.texts or ())

    def most_tokens(self) -> int | None:
        """Returns what each text is cut to; None: as many as the model takes."""
        return None

    def room(self, model: ServedModel, field: str) -> TextRoom:
        """The tokens that a text is cut to, or above which it is refused."""
        most = model.bounds.max_total_tokens if self.truncate == "NONE" else model.max_model_len
        return TextRoom(min(most, self.most_tokens() or most), _KEEPS[self.truncate], field=field)


class CohereEmbedRequest(CohereBody):
    """Body of POST /v2/embed."""

    input_type: Text = Field(description=_INPUT_TYPE)
    inputs: Items[EmbedInput] | None = Field(None, description="The same in parts of type `text`, which are joined.")
    max_tokens: Count | None = Field(None, ge=1, description="Cut each text to so many tokens, as `truncate` says.")
    output_dimension: Count | None = Field(None, ge=1, description="Shorter embeddings, of models trained for it.")
    embedding_types: Items[VectorForm] = Field(["float"], min_length=1, description=_FORMS)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise InvalidRequestError("give either texts or inputs", param="texts")
        return self

    def given(self) -> tuple[str, list[str]]:
        """See CohereBody."""
        if self.texts is not None:
            return "texts", list(self.texts)
        return "inputs", ["".join(part.text for part in one.content) for one in self.inputs or ()]

    def most_tokens(self) -> int | None:
        """See CohereBody."""
        return self.max_tokens


class CohereEmbedV1Request(CohereBody):
    """Body of POST /v1/embed, which LangChain's CohereEmbeddings asks."""

    texts: Items[Text] = Field(description="What to embed.")
    input_type: Text | None = Field(None, description=f"{_INPUT_TYPE} Left out: the model's usual one.")
    embedding_types: Items[VectorForm] | None = Field(
        None, min_length=1, description=f"{_FORMS} Left out: vectors as numbers, in a list."
    )


def cohere_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoints over `client`."""
    router = APIRouter(tags=["pooling"])

    @router.post("/v2/embed", openapi_extra=describe_body(CohereEmbedRequest))
    async def embed(request: Request) -> Response:
        """A vector for each text, in each of the forms that are asked for."""
        body = await read_body(request, CohereEmbedRequest)
        vectors, head = await _embedded(client, limits, request, body, body.input_type, body.output_dimension)
        return json_response(head | _by_type(vectors, body.embedding_types))

    @router.post("/v1/embed", openapi_extra=describe_body(CohereEmbedV1Request))
    async def embed_v1(request: Request) -> Response:
        """A vector for each text, in a list, or in each of the forms that are asked for."""
        body = await read_body(request, CohereEmbedV1Request)
        vectors, head = await _embedded(client, limits, request, body, body.input_type, None)
        if body.embedding_types is None:
            made = {"response_type": "embeddings_floats", "embeddings": [in_form(one, "float") for one in vectors]}
        else:
            made = _by_type(vectors, body.embedding_types)
        return json_response(head | made | {"meta": {**head["meta"], "api_version": {"version": "1"}}})

    return router


async def _embedded(
    client: EngineClient,
    limits: RequestLimits,
    request: Request,
    body: CohereBody,
    input_type: str | None,
    dimensions: int | None,
) -> tuple[list[Float32Array], dict[str, Any]]:
    """The vector of each text, and what answers of both versions have."""
    model = find_model(client, body.model)
    prompt = pooling_of(model).prompts.of(input_type=input_type)
    if prompt and body.truncate == "START" and pooling_of(model).skips_prompt:
        what = "a text that loses its beginning loses its prompt, whose tokens this model leaves out"
        raise UnsupportedError(what, param="truncate")
    field, texts = body.given()
    _check(texts, limits, field)
    pairs = [(prompt + text, None) for text in texts]
    made = await tokenise(work_of(request), model, pairs, body.room(model, field))
    prompts = prompted(model, prompt, made, field)
    params = PoolingParams(task="embed", dimensions=dimensions)
    answer_id = new_id("embd")
    names = {"prompt": field, "dimensions": "output_dimension"}
    results = await pool(client, request, body, model, prompts, params, request_id=answer_id, names=names)
    meta = meta_of({"input_tokens": sum(len(one.token_ids) for one in prompts)})
    return [result.array() for result in results], {"id": answer_id, "texts": texts, "meta": meta}


def _by_type(vectors: list[Float32Array], forms: Sequence[VectorForm]) -> dict[str, Any]:
    embeddings = {form: [in_form(vector, form) for vector in vectors] for form in dict.fromkeys(forms)}
    return {"response_type": "embeddings_by_type", "embeddings": embeddings}


def _check(texts: list[str], limits: RequestLimits, field: str) -> None:
    if not texts:
        raise InvalidRequestError("the list of texts is empty", param=field)
    if len(texts) > limits.max_prompts:
        raise InvalidRequestError(f"{len(texts)} texts; at most {limits.max_prompts}", param=field)
    check_total_chars(sum(map(len, texts)), limits, field)


ENDPOINT = Endpoint(lambda api: cohere_routes(api.client, api.limits), (CohereEmbedRequest, CohereEmbedV1Request))
