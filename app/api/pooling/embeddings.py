"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body
from app.api.http.work_pool import work_of
from app.api.pooling.answer import listed, new_id, numbers
from app.api.pooling.inputs import read_inputs
from app.api.pooling.protocol import EmbeddingRequest
from app.api.pooling.run import pool
from app.api.pooling.texts import pooling_of
from app.api.pooling.token_vectors import weights_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.records.pooling_params import PoolingParams


def embedding_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The embeddings endpoint over `client`."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/embeddings", openapi_extra=describe_body(EmbeddingRequest))
    async def create_embeddings(request: Request) -> Response:
        """A vector for each input, in their order."""
        body = await read_body(request, EmbeddingRequest)
        model = find_model(client, body.model)
        sparse = pooling_of(model).token_heads is not None and body.encoding_format == "sparse"
        if sparse and body.dimensions is not None:
            raise InvalidRequestError("weights of tokens have no dimensions to cut", param="dimensions")
        prompts = await read_inputs(work_of(request), body, model, limits)
        activation = body.use_activation if body.normalize is None else body.normalize
        params = PoolingParams(
            task="token_classify" if sparse else "embed", dimensions=body.dimensions, use_activation=activation
        )
        answer_id = new_id("embd")
        results = await pool(client, request, body, model, prompts, params, request_id=answer_id)
        if sparse:
            made: list[Any] = [weights_of(model, *one) for one in zip(prompts, results, strict=True)]
        else:
            made = [numbers(result, body.encoding_format) for result in results]
        data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(made)]
        return listed(answer_id, body.model or model.name, data, prompts)

    return router


ENDPOINT = Endpoint(lambda api: embedding_routes(api.client, api.limits), (EmbeddingRequest,))
