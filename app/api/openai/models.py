"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import find_model
from app.api.http.json_response import JSONResponse
from app.text.served_model import ServedModel


def model_routes(client: EngineClient) -> APIRouter:
    """Endpoints that list the models of `client`."""
    router = APIRouter(tags=["openai"])

    @router.get("/v1/models")
    async def list_models() -> JSONResponse:
        """Every model, aliases included."""
        data = [_describe(name, model) for name, model in client.models.items()]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> JSONResponse:
        """One model, by name or alias."""
        return JSONResponse(_describe(model_id, find_model(client, model_id)))

    return router


def _describe(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "manta",
        "root": model.root or model.name,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
        "input_modalities": list(model.input_modalities),
    }


ENDPOINT = Endpoint(lambda api: model_routes(api.client))
