"""Adapters loaded and unloaded at all replicas of a model, under vLLM's names."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse

from app.api.admin.fleet import TIMEOUT_S, Fleet, called
from app.api.generation.render import find_model
from app.api.http.body import describe_body, read_body
from app.api.http.strict_models import StrictModel
from app.checkpoints.adapters.adapter_files import within
from app.engine.control.adapters import Name
from app.errors import InvalidRequestError, ModelNotFoundError

MAX_PATH_CHARS = 4096
MODEL = "Whose replicas are meant; the first model when not given."
IntId = Annotated[int, Field(ge=1, le=(1 << 63) - 1)]


class LoadAdapterRequest(StrictModel):
    """Body of POST /v1/load_lora_adapter."""

    ignored = MappingProxyType({"base_model_name": "the model is named by `model`"})

    model: str | None = Field(None, description=MODEL)
    lora_name: Name = Field(description="The name that requests give as `model`.")
    lora_path: str = Field(
        min_length=1, max_length=MAX_PATH_CHARS,
        description="Absolute path of its directory, on every node, under one of `admin.adapter_roots`.",
    )  # fmt: skip
    load_inplace: bool = Field(False, description="Take the place of another adapter of this name.")


class UnloadAdapterRequest(StrictModel):
    """Body of POST /v1/unload_lora_adapter."""

    model: str | None = Field(None, description=MODEL)
    lora_name: Name = Field(description="The adapter's name.")
    lora_int_id: IntId | None = Field(None, description="Says nothing here: adapters are known by name.")


def adapter_routes(fleet: Fleet, roots: tuple[str, ...]) -> APIRouter:
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter. `roots`: where adapters may lie."""
    router = APIRouter(tags=["adapters"])

    @router.post("/v1/load_lora_adapter", openapi_extra=describe_body(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> PlainTextResponse:
        """Serve an adapter: all replicas do, or none."""
        body = await read_body(request, LoadAdapterRequest)
        model = find_model(fleet, body.model).name
        if body.lora_name in fleet.models:
            raise InvalidRequestError(f"lora_name: {body.lora_name!r} is the name of a model", param="lora_name")
        path = str(within(body.lora_path, map(Path, roots)))
        arguments = {"name": body.lora_name, "path": path, "in_place": body.load_inplace}
        await called(fleet, model, "load_adapter", arguments, TIMEOUT_S)
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=describe_body(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> PlainTextResponse:
        """Serve it no longer; requests that run end with it."""
        body = await read_body(request, UnloadAdapterRequest)
        model = find_model(fleet, body.model).name
        answers = await fleet.control(model, "unload_adapter", {"name": body.lora_name}, TIMEOUT_S)
        if error := next((one.error for one in answers if one.error is not None), None):
            raise error
        if not any(one.result for one in answers):
            raise ModelNotFoundError(f"lora_name: no adapter {body.lora_name!r} is loaded", param="lora_name")
        return PlainTextResponse(f"Success: LoRA adapter {body.lora_name!r} removed successfully.")

    return router
