"""Reading a JSON body into its model, and describing it for /docs.

One pass from bytes to model; the structure is parsed a second time only to name the field of a fault.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from app.api.http.errors import ClientDisconnected, unknown_fields, validation_error
from app.api.http.field_rule import rule_of
from app.api.http.strict_models import IgnoredFields
from app.api.http.work_pool import PARSE_S_PER_BYTE, work_of
from app.errors import InvalidRequestError

if TYPE_CHECKING:  # `LLM` comes through here, and FastAPI is a third of a second of its import
    from fastapi import FastAPI

BodyT = TypeVar("BodyT", bound=BaseModel)

# Python's parsers hold the interpreter lock, also in a thread: what one body costs is bounded by what is in it.
MAX_MEMBERS = 1 << 17  # members of all objects of a body; each may be a fault, and faults cost more than what is right
MAX_CONTAINERS = 1 << 17  # arrays and objects: some hundred bytes and a microsecond each
MAX_VALUES = 1 << 21  # values in all arrays and objects, such as token ids
# Texts may be JSON again (arguments of earlier calls, schemas), which is parsed too: brackets and quotes of all texts.
MAX_BRACKETS_OF_TEXTS = 1 << 20
MAX_QUOTES_OF_TEXTS = 1 << 21
MAX_DEPTH = 64  # levels of nested arrays and objects, unless the application's limits say otherwise
# An unclosed string takes all that is left: tried again at each of its quotes, it would cost the square of its length.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# Some thousand strings and what is between them, then the lock is let go. It matches everywhere, or it would look for a
# quote again from each character.
_STRINGS = re.compile(rb'(?:[^"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"?){1,8192}+', re.DOTALL)
_OPENINGS = (rb"\u005b", rb"\u005B", rb"\u007b", rb"\u007B")
_QUOTES = (rb"\"", rb"\u0022")  # inside of a string
_PIECE_BYTES = 1 << 18  # that are looked at in one go
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
REF = "#/components/schemas/{model}"


async def read_body(request: Request, model: type[BodyT]) -> BodyT:
    """The request's body as `model`; InvalidRequestError names the field at fault, or says that it is no JSON.

    Where the application looks for adapters (`learn_name`), the one that it names is looked for.
    """
    _check_content_type(request.headers.get("content-type", ""))
    raw = bytearray()
    try:
        async for chunk in request.stream():
            raw += chunk
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    request.state.num_body_bytes = len(raw)  # an estimate of what else is done with it; the bytes are not kept
    max_depth = getattr(request.app.state, "max_json_depth", MAX_DEPTH)
    rule = rule_of(request)
    ignored = IgnoredFields()
    ignored.ignores_unknown = rule.ignores_unknown(model)
    cost_s = PARSE_S_PER_BYTE * len(raw)
    body = await work_of(request).run(cost_s, _parse, raw, model, max_depth, ignored)
    if ignored:
        rule.count(request, ignored)
    learn = getattr(request.app.state, "learn_name", None)
    if learn is not None and isinstance(name := getattr(body, "model", None), str):
        await learn(name)
    return body


def validated(request: Request, values: dict[str, Any], model: type[BodyT]) -> BodyT:
    """Fields that came otherwise, by the rules of a body; InvalidRequestError names the field at fault."""
    rule, ignored = rule_of(request), IgnoredFields()
    ignored.ignores_unknown = rule.ignores_unknown(model)
    body = _parse(json.dumps(values).encode(), model, MAX_DEPTH, ignored)
    if ignored:
        rule.count(request, ignored)
    return body


async def read_optional_body(request: Request, model: type[BodyT]) -> BodyT:
    """The same; without a body what `model` is by default."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return model()
    return await read_body(request, model)


def _check_content_type(given: str) -> None:
    """A page of any origin may post other types without asking (no CORS preflight): they are not read as JSON."""
    media_type = given.partition(";")[0].strip().lower()
    kind, _, subtype = media_type.partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        named = f"not {media_type[:100]!r}" if media_type else "which is missing"
        raise InvalidRequestError(f"the body must be JSON: send the header `Content-Type: application/json`, {named}")


def _parse(raw: bytes | bytearray, model: type[BodyT], max_depth: int, ignored: IgnoredFields) -> BodyT:
    """The body, with what was not read of it in `ignored`. Where unknown fields are ignored, a body that has some is
    parsed twice, however many there are."""
    check_shape(raw, max_depth)
    try:
        return model.model_validate_json(raw, context=ignored)
    except ValidationError as error:
        unknown = unknown_fields(error) if ignored.ignores_unknown else []
        if not unknown:
            raise validation_error(error, _structure(raw)) from error
    ignored.begin(unknown)
    try:
        return model.model_validate_json(raw, extra="ignore", context=ignored)
    except ValidationError as error:
        raise validation_error(error, _structure(raw)) from error


def _structure(raw: bytes | bytearray) -> Any:
    """The body as Python's own parser reads it; None where only pydantic's can (or neither)."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None


def check_shape(raw: bytes | bytearray, max_depth: int, noun: str = "body") -> None:
    """Refuse JSON of a client that nests arrays and objects too deeply, or has too many of them, or too many members or
    values: to be asked of all that a client sends, before anything parses it. Most of it is too short to ask.

    Raises InvalidRequestError, which calls it `noun`.
    """
    found = _count(raw, b'[{:,"\\')
    _check_texts(raw, found, noun)
    may_be_deep = found["["] + found["{"] > max_depth
    if not may_be_deep and found[":"] <= MAX_MEMBERS and found[","] <= MAX_VALUES:
        return
    # An escaped quote is one of both counts, so there are at least so many strings.
    num_escaped = _count_text(raw, rb"\"") if found["\\"] else 0
    if (found['"'] - num_escaped) // 2 > MAX_VALUES + MAX_MEMBERS:
        raise InvalidRequestError(f"the {noun} has more than {MAX_VALUES} values")
    bare = _outside_strings(raw)
    _check_counts(bare, noun)
    brackets = np.frombuffer(bare.translate(None, _NO_BRACKETS), np.uint8)
    is_opening = (brackets == ord("[")) | (brackets == ord("{"))
    depths = np.cumsum(np.where(is_opening, 1, -1), dtype=np.int32)
    if depths.size and depths.max() > max_depth:
        raise InvalidRequestError(f"the {noun} nests arrays and objects more than {max_depth} deep")


def _check_texts(raw: bytes | bytearray, found: Mapping[str, int], noun: str) -> None:
    """Refuse what is much to parse where its strings are JSON themselves; escapes count as what they stand for."""
    if len(raw) <= MAX_BRACKETS_OF_TEXTS:
        return
    num_openings, num_quotes = found["["] + found["{"], 0
    if found["\\"]:
        num_openings += sum(_count_text(raw, text) for text in _OPENINGS)
        num_quotes = sum(_count_text(raw, text) for text in _QUOTES)
    if num_openings > MAX_BRACKETS_OF_TEXTS or num_quotes > MAX_QUOTES_OF_TEXTS:
        raise InvalidRequestError(
            f"the texts and values of the {noun} hold more than {MAX_BRACKETS_OF_TEXTS} opening brackets or "
            f"{MAX_QUOTES_OF_TEXTS} quotes"
        )


def _count(raw: bytes | bytearray, characters: bytes) -> dict[str, int]:
    """Counts each of some characters. A long text is looked at by numpy, which lets go of the interpreter
    lock: `count` holds it to the end, and whoever waits for it, the event loop above all, waits as long."""
    if len(raw) <= _PIECE_BYTES:
        return {chr(code): raw.count(code) for code in characters}
    found = dict.fromkeys(map(chr, characters), 0)
    codes = np.frombuffer(raw, np.uint8)
    for start in range(0, len(codes), _PIECE_BYTES):
        piece = codes[start : start + _PIECE_BYTES]
        for code in characters:
            found[chr(code)] += int(np.count_nonzero(piece == code))
    return found


def _count_text(raw: bytes | bytearray, text: bytes) -> int:
    """Counts `text`, which does not overlap itself; piece by piece, for the lock."""
    more = len(text) - 1
    return sum(raw.count(text, start, start + _PIECE_BYTES + more) for start in range(0, len(raw), _PIECE_BYTES))


def _outside_strings(raw: bytes | bytearray) -> bytes:
    return b"".join(_STRING.sub(b"", strings.group()) for strings in _STRINGS.finditer(raw))


def _check_counts(bare: bytes, noun: str) -> None:
    """`bare` is JSON without its strings."""
    if bare.count(b":") > MAX_MEMBERS:
        raise InvalidRequestError(f"the objects of the {noun} have more than {MAX_MEMBERS} members")
    if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequestError(f"the {noun} has more than {MAX_CONTAINERS} arrays and objects")
    if bare.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"the {noun} has more than {MAX_VALUES} values")


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is read by `read_body`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def body_schemas(*models: type[BaseModel]) -> dict[str, Any]:
    """Schemas of all bodies and what they refer to, for the document's components."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def add_body_schemas(app: FastAPI, *models: type[BaseModel]) -> None:
    """Put the schemas of hand-read bodies into the application's OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(body_schemas(*models))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
