"""Reading a JSON body into its model, and describing it for /docs.

One pass from bytes to model; the structure is parsed a second time only to name the field of a fault.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from app.api.errors import ClientDisconnected, validation_error

BodyT = TypeVar("BodyT", bound=BaseModel)

# Bodies above this many bytes (some milliseconds of work) are parsed in a thread, beside the event loop.
THREAD_BYTES = 1 << 18
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """The request's body as `model`, whatever content type it claims; InvalidRequestError names the field at fault."""
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    if len(raw) > THREAD_BYTES:
        return await asyncio.to_thread(_parse, raw, model)
    return _parse(raw, model)


def _parse(raw: bytes, model: type[BodyT]) -> BodyT:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        is_json = all(fault["type"] != "json_invalid" for fault in error.errors(include_url=False))
        raise validation_error(error, json.loads(raw) if is_json else None) from error


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is read by `read_body`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Schemas of all bodies and what they refer to, for the document's components."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
