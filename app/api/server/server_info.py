"""Describes a server on request: its tokenizers (`ingress.tokenizer_info`), its options (`ingress.admin`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.generation.render import find_model
from app.api.http.json_response import JSONResponse, json_response
from app.config.serve import ServeConfig
from app.version import VERSION

_SECRET = {"ingress": {"api_keys_file", "api_key_hashes"}, "admin": {"keys_file"}}


def tokenizer_info_routes(client: EngineClient) -> APIRouter:
    """GET /tokenizer_info over `client`'s models."""
    router = APIRouter(tags=["tokenizer"])

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """The tokenizer's configuration and the chat template. Open only with `ingress.tokenizer_info`."""
        served = find_model(client, model)
        config, template = served.tokenizer.config, served.chat_template.source or None
        return json_response({"tokenizer_class": None, **config, "chat_template": template})

    return router


def server_info_routes(config: ServeConfig) -> APIRouter:
    """GET /server_info: the options in force."""
    router = APIRouter(tags=["debug"])

    @router.get("/server_info")
    async def server_info() -> JSONResponse:
        """Version and options of the server, without its keys; beside the API open only with `ingress.admin`."""
        options: dict[str, Any] = config.model_dump(mode="json", exclude=_SECRET)
        return JSONResponse({"version": VERSION, "config": options})

    return router


TOKENIZER_INFO = Endpoint(lambda api: tokenizer_info_routes(api.client), is_open=lambda ingress: ingress.tokenizer_info)
