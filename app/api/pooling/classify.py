"""POST /classify and /pooling: probabilities of classes, and whatever a pooling model has to give."""

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
from app.api.pooling.protocol import ClassifyRequest, PoolingRequest
from app.api.pooling.run import pool
from app.api.pooling.texts import pooling_of
from app.api.pooling.token_vectors import all_of
from app.config.limits import RequestLimits
from app.errors import InvalidRequestError
from app.records.pooling_params import PoolingParams


def classify_routes(client: EngineClient, limits: RequestLimits) -> APIRouter:
    """The endpoints over `client`."""
    router = APIRouter(tags=["pooling"])

    @router.post("/classify", openapi_extra=describe_body(ClassifyRequest))
    async def classify(request: Request) -> Response:
        """Probabilities of the classes, and the most likely one's label, for each input."""
        body = await read_body(request, ClassifyRequest)
        model = find_model(client, body.model)
        labels = pooling_of(model).labels
        params = PoolingParams(task="classify", use_activation=body.use_activation)
        prompts = await read_inputs(work_of(request), body, model, limits)
        answer_id = new_id("classify")
        results = await pool(client, request, body, model, prompts, params, request_id=answer_id)
        data = []
        for i, result in enumerate(results):
            scores = result.array()
            label = labels[int(scores.argmax())]
            data.append({"index": i, "label": label, "probs": scores.tolist(), "num_classes": len(labels)})
        return listed(answer_id, body.model or model.name, data, prompts)

    @router.post("/pooling", openapi_extra=describe_body(PoolingRequest))
    async def raw_pooling(request: Request) -> Response:
        """The model's own result for each input: a vector for each token, a vector, or scores."""
        body = await read_body(request, PoolingRequest)
        model = find_model(client, body.model)
        task = body.task or pooling_of(model).raw_task
        params = PoolingParams(task=task, dimensions=body.dimensions, use_activation=body.use_activation)
        if task == "all" and body.encoding_format == "sparse":
            raise InvalidRequestError("the task all answers vectors, too: float or base64", param="encoding_format")
        prompts = await read_inputs(work_of(request), body, model, limits)
        answer_id = new_id("pool")
        results = await pool(client, request, body, model, prompts, params, request_id=answer_id)
        if task == "all":
            form = body.encoding_format
            made: list[Any] = [all_of(model, *one, form) for one in zip(prompts, results, strict=True)]
        else:
            made = [numbers(result, body.encoding_format) for result in results]
        data = [{"index": i, "object": "pooling", "data": one} for i, one in enumerate(made)]
        return listed(answer_id, body.model or model.name, data, prompts)

    return router


ENDPOINT = Endpoint(
    lambda api: classify_routes(api.client, api.limits),
    (
        ClassifyRequest,
        PoolingRequest,
    ),
)
