"""Reading a JSON body into its model, and describing it for /docs.

One pass from bytes to model; the structure is parsed a second time only to name the field of a fault.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from app.api.errors import ClientDisconnected, validation_error
from app.errors import InvalidRequestError

BodyT = TypeVar("BodyT", bound=BaseModel)

# Bodies above this many bytes (some milliseconds of work) are parsed in a thread, beside the event loop.
THREAD_BYTES = 1 << 18
MAX_DEPTH = 64  # of nested arrays and objects, unless the application's limits say otherwise
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_BRACKET = re.compile(rb"[][{}]")
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """The request's body as `model`, whatever content type it claims; InvalidRequestError names the field at fault."""
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    max_depth = getattr(request.app.state, "max_json_depth", MAX_DEPTH)
    if len(raw) > THREAD_BYTES:
        return await asyncio.to_thread(_parse, raw, model, max_depth)
    return _parse(raw, model, max_depth)


def _parse(raw: bytes, model: type[BodyT], max_depth: int) -> BodyT:
    if _is_deeper(raw, max_depth):
        raise InvalidRequestError(f"the body nests arrays and objects more than {max_depth} deep")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise validation_error(error, _structure(raw)) from error


def _structure(raw: bytes) -> Any:
    """The body as Python's own parser reads it; None where only pydantic's can (or neither)."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def _is_deeper(raw: bytes, max_depth: int) -> bool:
    """Whether arrays and objects nest more than `max_depth` deep. Most bodies have too few brackets to ask."""
    if raw.count(b"[") + raw.count(b"{") <= max_depth:
        return False
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub(b"", raw)):
        depth += 1 if match[0] in b"[{" else -1
        if depth > max_depth:
            return True
    return False


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is read by `read_body`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Schemas of all bodies and what they refer to, for the document's components."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas
