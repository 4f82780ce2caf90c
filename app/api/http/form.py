"""Reading a form (multipart/form-data): its one file, and its fields as the JSON of a body would have them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import NoneType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from app.api.http.body import validated
from app.api.http.errors import BodyTooLargeError
from app.errors import InvalidRequestError

FormT = TypeVar("FormT", bound=BaseModel)
FORM_BYTES = 64 << 10  # a form's size without its file
_FLAGS = {"true": True, "false": False, "1": True, "0": False}


@asynccontextmanager
async def read_form(request: Request, max_fields: int, max_field_bytes: int = 1024) -> AsyncIterator[FormData]:
    """The form that a request brings; InvalidRequestError where it is none or cannot be read."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError("expected a form: multipart/form-data")
    try:
        async with request.form(max_files=1, max_fields=max_fields, max_part_size=max_field_bytes) as form:
            yield form
    except FormParserError as error:  # Starlette lets it pass
        raise InvalidRequestError(f"the form cannot be read: {error}") from error


def uploaded(form: FormData, name: str, max_bytes: int) -> UploadFile:
    """The file in a form; InvalidRequestError where there is none, or too large a one."""
    upload = form.get(name)
    if not isinstance(upload, UploadFile):
        raise InvalidRequestError(f"{name!r} is required, as a file", param=name)
    if not upload.size:
        raise InvalidRequestError("the file is empty", param=name)
    if upload.size > max_bytes:
        raise BodyTooLargeError(f"the file exceeds the limit of {max_bytes} bytes", param=name)
    return upload


def fields_of(request: Request, form: FormData, model: type[FormT], file: str) -> FormT:
    """The fields of a form beside its `file`, as `model`: by the same rules as those of a JSON body.

    A list's items come under its name, with or without brackets behind it, as often as there are items.
    InvalidRequestError names the field at fault.
    """
    values: dict[str, Any] = {}
    for key, value in form.multi_items():
        if key == file:
            continue
        if isinstance(value, UploadFile):
            raise InvalidRequestError(f"{key[:256]!r}: expected a text, not a file", param=key[:256])
        name, _, inner = key.partition("[")
        kinds = _kinds(model, name)
        if list in kinds:
            values.setdefault(name, []).append(_read(value, kinds))
        elif inner.rstrip("]"):
            within = values.setdefault(name, {})
            if isinstance(within, dict):
                within[inner.rstrip("]")] = value
        elif name in values:
            raise InvalidRequestError("is given twice", param=name[:256])
        else:
            values[name] = _read(value, kinds)
    return validated(request, values, model)


def _kinds(model: type[BaseModel], name: str) -> frozenset[Any]:
    """The plain types that a field's annotation is made of."""
    field = model.model_fields.get(name)
    found, left = set(), [] if field is None else [field.annotation]
    while left:
        one = left.pop()
        found.add(getattr(one, "__origin__", one))
        left += [part for part in get_args(one) if isinstance(part, type) or get_args(part)]
    return frozenset(found - {NoneType})


def _read(text: str, kinds: frozenset[Any]) -> Any:
    """A text as the flag or the number that its field holds; itself where it is none, which validation says."""
    if bool in kinds:
        return _FLAGS.get(text.lower(), text)
    for kind in (int, float):
        if kind in kinds:
            try:
                number = kind(text)
            except ValueError:
                continue
            return text if kind is float and not math.isfinite(number) else number
    return text


def form_description(model: type[BaseModel], file: str) -> dict[str, Any]:
    """`openapi_extra` of a route whose form is read by `fields_of`."""
    own: Mapping[str, Any] = model.model_json_schema()
    properties = {file: {"type": "string", "format": "binary"}, **own["properties"]}
    required = [file, *own.get("required", ())]
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
