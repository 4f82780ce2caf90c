"""Every error in the shape of the dialect that the route speaks, with the right HTTP status.

OpenAI's is {"error": {"message", "type", "param", "code"}}, Anthropic's
{"type": "error", "error": {"type", "message"}, "request_id"}.
Faults of validation are translated so that `param` is the dotted path of the field in the body that was sent.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from app.api.http.json_response import JSONResponse
from app.api.http.route_hint import route_hint
from app.errors import InvalidRequestError, MantaError, OverloadedError, PoisonedRequestError, UnsupportedError

if TYPE_CHECKING:  # `LLM` comes through here, and FastAPI is a third of a second of its import
    from fastapi import FastAPI, Request

logger = logging.getLogger("manta.api")

_HTTP_TYPES = {404: "not_found_error", **dict.fromkeys((400, 405, 413), "invalid_request_error")}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
}
ANTHROPIC_ROUTE = "/v1/messages"


class BodyTooLargeError(InvalidRequestError):
    """The HTTP body exceeds the limit."""

    status = 413
    code = "body_too_large"


class EncodedBodyError(InvalidRequestError):
    """The HTTP body is compressed."""

    status = 415
    code = "unsupported_content_encoding"


class BodyTimeoutError(InvalidRequestError):
    """The HTTP body did not come in time."""

    status = 408
    code = "body_timeout"


class HeadersTooLargeError(InvalidRequestError):
    """The HTTP headers exceed the limits."""

    status = 431
    code = "headers_too_large"


class ThreadUnsupportedError(UnsupportedError):
    """Anthropic's `thread` asks the server to hold the conversation; its SDK reads `details` and does without."""

    details: Mapping[str, Any] = MappingProxyType(
        {"error_code": "thread_unsupported_request", "unsupported": ("thread",)}
    )


class ClientDisconnected(Exception):
    """The client closed the connection; nobody is left to read a response."""


def error_body(error: MantaError) -> dict[str, Any]:
    """The JSON object that describes `error` in OpenAI's dialect."""
    described = {"message": _named(error), "type": error.type, "param": error.param, "code": error.code}
    return {"error": described}


def anthropic_error_body(message: str, status: int, request_id: str | None = None) -> dict[str, Any]:
    """The JSON object that describes an error in Anthropic's dialect."""
    described = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": described, "request_id": request_id}


def speaks_anthropic(scope: Scope) -> bool:
    """True if the route of a connection is one of Anthropic's dialect."""
    path: str = scope["path"]
    return path == ANTHROPIC_ROUTE or path.startswith(ANTHROPIC_ROUTE + "/")


def as_manta_error(error: Exception) -> MantaError:
    """`error` itself when a user may read it; anything else is logged and becomes an internal error."""
    if isinstance(error, MantaError):
        return error
    if isinstance(error, ValidationError):
        return validation_error(error, None)
    logger.exception("unexpected error", exc_info=error)
    return MantaError("internal server error")


def error_response(error: MantaError, scope: Scope) -> Response:
    """The HTTP response for `error` in the dialect of the route; 429 and 503 say when to come back."""
    headers = _retry_headers(error) if error.status in (429, 503) else {}
    if isinstance(error, PoisonedRequestError):
        headers["x-should-retry"] = "false"  # read by the SDKs of OpenAI and Anthropic
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if speaks_anthropic(scope):
        body = anthropic_error_body(_named(error), error.status, _request_id(scope))
        if isinstance(error, ThreadUnsupportedError):
            body["error"]["details"] = dict(error.details)
    else:
        body = error_body(error)
    return _json_response(body, error.status, headers or None)


def _retry_headers(error: MantaError) -> dict[str, str]:
    """Whole seconds for everybody, milliseconds for the SDKs of OpenAI and Anthropic."""
    after_s = error.retry_after_s if isinstance(error, OverloadedError) else 1.0
    return {"Retry-After": str(max(1, math.ceil(after_s))), "retry-after-ms": str(max(1, math.ceil(after_s * 1e3)))}


def _named(error: MantaError) -> str:
    """The message, with the field before it where it names none: many clients show nothing else of an error."""
    has_name = not error.param or re.search(rf"(?<!\w){re.escape(error.param)}(?!\w)", error.message)
    return error.message if has_name else f"{error.param}: {error.message}"


def _request_id(scope: Scope) -> str | None:
    request_id: str | None = scope.get("state", {}).get("request_id")
    return request_id


def validation_error(error: ValidationError, body: Any) -> InvalidRequestError:
    """The most telling fault of a pydantic error, as one InvalidRequestError.

    `body` is the parsed JSON: its structure tells the field's path from the names of union members.
    """
    details = error.errors(include_url=False, include_input=False)
    faults = [(_path(fault["loc"], body, fault["type"] == "missing"), fault) for fault in details]
    # Where a union failed, the member that got furthest is the one the client meant.
    path, fault = max(faults, key=lambda pair: len(pair[0]))
    param = ".".join(str(part) for part in path) or None
    kind, message = fault["type"], fault["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {fault['ctx']['error']}")
    if kind == "union_tag_invalid":
        tag, known = fault["ctx"]["tag"], fault["ctx"]["expected_tags"]
        return UnsupportedError(f"{param}: type {tag!r} is not supported; known: {known}", param=param)
    if kind == "unsupported":
        field = fault.get("ctx", {}).get("field")
        return UnsupportedError(message, param=".".join(filter(None, (param, field))) or None)
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field {param!r}", param=param)
    if kind == "missing":
        return InvalidRequestError(f"{param!r} is required", param=param)
    return InvalidRequestError(f"{param}: {message}" if param else message, param=param)


def unknown_fields(error: ValidationError) -> list[str]:
    """Names of the fields that a body's model does not know, as far as pydantic got."""
    details = error.errors(include_url=False, include_input=False, include_context=False)
    return [str(fault["loc"][-1]) for fault in details if fault["type"] == "extra_forbidden"]


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """`error` with the field that the client sent; `names` holds the dialect's word for each field of ours."""
    field = (error.param or "").partition(".")[0]
    if field not in names or error.param is None:
        return error
    return type(error)(error.message.removeprefix(f"{error.param}: "), param=names[field])


@contextlib.contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals from inside the block are `renamed`, faults of validation among them."""
    try:
        yield
    except ValidationError as error:
        raise renamed(validation_error(error, None), names) from error
    except InvalidRequestError as error:
        if renamed(error, names) is error:  # as its own cause it would hold the request until somebody looks for cycles
            raise
        raise renamed(error, names) from error


def _path(loc: tuple[int | str, ...], body: Any, is_missing: bool) -> list[int | str]:
    """The parts of `loc` that are steps into `body`, with the last one where that is what is missing."""
    path: list[int | str] = []
    here = body
    for i, part in enumerate(loc):
        try:
            here = here[part]
        except (TypeError, LookupError):
            if body is not None and not (is_missing and i == len(loc) - 1):
                continue
        path.append(part)
    return path


def install_error_handlers(app: FastAPI) -> None:
    """Answer what routes raise on purpose in the dialect's shape; RequestContext answers the rest."""

    @app.exception_handler(MantaError)
    async def on_manta_error(request: Request, error: Exception) -> Response:
        response = error_response(as_manta_error(error), request.scope)
        _forget_frames(error)
        return response

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"no such route: {request.method} {request.url.path}{route_hint(request)}"
        if error.status_code == 405:
            message = f"{request.method} is not allowed on {request.url.path}"
        kind = _HTTP_TYPES.get(error.status_code, "api_error")
        body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        if speaks_anthropic(request.scope):
            body = anthropic_error_body(message, error.status_code, _request_id(request.scope))
        return _json_response(body, error.status_code, dict(error.headers or {}))

    @app.exception_handler(ClientDisconnect)  # while a form is read
    @app.exception_handler(ClientDisconnected)
    async def on_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=499)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a refusal hold, such as a body of megabytes: cycles are collected much later."""
    while error is not None and error.__traceback__ is not None:  # an error may be its own cause
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _json_response(body: dict[str, Any], status: int, headers: dict[str, str] | None) -> Response:
    return JSONResponse(body, status, headers)
