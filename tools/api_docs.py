"""Writes docs/api.md: every route, and every field of every request with its type, default and meaning.

    python -m tools.api_docs           # rewrite the page
    python -m tools.api_docs --check   # exit 1 when the page is stale

All of it comes from the application itself: the routes, the OpenAPI document, and what each body refuses by name.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from app.api.admin.app import create_admin_app
from app.api.endpoints import bodies
from app.api.http.auth import ApiKeys
from app.api.http.http_metrics import IGNORED_HEADERS
from app.api.openai.responses_protocol import ResponsesRequest
from app.api.openai.responses_socket import ResponseCreate
from app.api.server.app import create_app
from app.api.server.fleet import fleet_routes
from app.config.limits import RequestLimits
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.telemetry.tenant_tokens import TenantLabels
from tools.markdown import cell, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
REF = "#/components/schemas/"
INTRODUCTION = """# HTTP API

This page is written by `python -m tools.api_docs`; a test fails when it is stale.

*Refused* means that the server knows the field and says why it does not take it: it would change the answer. *Ignored*
means that it is known and changes nothing. A field that is not listed here is unknown. On the routes that agents use
(`/v1/responses`, `/v1/messages` and what belongs to them) unknown fields are ignored, so that a client's next version
does not break, and so are tools of types that no table has, which the model is not shown; on all others they are a 400
that names them. `limits.unknown_fields` chooses one or the other for all.
`manta:ingress_ignored_fields_total` counts what was ignored by its name here, what is unknown as `other`; the log has
the names of those, each once. What messages, content parts and items of an earlier conversation carry besides is not
looked at, as clients send them back with fields of their own. Errors have the shape of the dialect
that the route speaks: OpenAI's `{"error": {"message", "type", "param", "code"}}`, and on `/v1/messages` Anthropic's
`{"type": "error", "error": {"type", "message"}, "request_id"}`. Every answer carries the server's name for the request
in `x-request-id` and `request-id`.

Where the server has API keys, every route but `/health`, `/live`, `/ready`, `/ping` and the pages (`/`, `/status`) asks
for one, as `Authorization: Bearer KEY` or `x-api-key: KEY`. Keys come from `ingress.api_keys_file` (one a line,
`[tenant=]key` or `[tenant=]sha256:HEX`), from `ingress.api_key_hashes`, and from the environment of the ingress
replicas (`MANTA_API_KEYS`, `MANTA_API_KEYS_FILE`). Tenants share neither cached prefixes nor kept responses.

The routes that generate (chat, completions, responses, messages, `/v1/chat/completions/batch`,
`/inference/v1/generate` and `/generate`) heed the header `Idempotency-Key`: a request that is sent again with its key
gets the first one's answer, and runs once. A key that was sent with another path or body is a 422 (`docs/batches.md`).

Their answers, streams too, tell gateways how busy the engines are where a request has the header
`endpoint-load-metrics-format: TEXT` or `JSON` (ORCA, as with vLLM): `endpoint-load-metrics` is then
`TEXT named_metrics.kv_cache_usage_perc=0.25, ...` or `JSON {"named_metrics": {"kv_cache_usage_perc": 0.25, ...}}`. It
has `num_requests_waiting` and `num_requests_running` of all engine replicas that the ingress reaches, and of their KV
caches the fullest model's. Other formats are answered without the header.
"""


class _NoEngine:
    """The application is built, but never asked."""

    models: Mapping[str, Any] = {}


SOCKETS = """
## Websockets

`/v1/responses` takes websockets too (`client.responses.connect()` of the openai SDK, `OpenAIResponsesWSModel` of its
agents library): with the key in the handshake's headers, one message `response.create` for each response, and the
events of the stream back, each as a message. A message has the fields of a POST, without `stream` and `background`, and

"""
SOCKETS_END = """
Messages are answered one after another, whatever their streams; 16 may wait. Each takes the way of a POST: limits,
tenants, metrics and a line in the access log, with the request id of the handshake and a number behind it; headers of
the handshake count for all, but `idempotency-key`, which is left out. A refusal is an event `error` with `status` and
`error`, and the socket stays open. The last response of each of 8 streams (`stream_id`) can be continued on its socket,
with `store: false` too, as long as the conversation is no longer than one body may be; what is stored can be continued
everywhere. Closing the socket aborts the answer under way.

A socket is closed with 1001 when it is idle for `ingress.socket_idle_s`, or older than `ingress.max_socket_s` (after an
event with the code `websocket_connection_limit_reached`, once the answer under way has ended), with 1008 when too many
messages wait, with 1009 by a message of more than 16 MiB (the HTTP server's limit; the `max_body_bytes` of a POST hold
besides) or 4,096 frames, with 1013 when messages that have come in part take more than 256 MiB together, and with 1012
when its server ends, once the answer under way has ended: after SIGTERM, and when Serve takes the ingress replica out
of service, after the time that balancers have to notice. SDKs open another then. At most
`ingress.max_sockets` are open in a replica, `max_tenant_sockets` of a tenant. Pages of other origins than
`ingress.cors_origins` can open none.
"""
HEADERS = """
## Headers

Authorization: `authorization`, `x-api-key`. The request's id: `x-request-id`. Its deadline: `x-request-timeout-ms`, or
what SDKs send (`x-stainless-read-timeout`, `x-stainless-timeout`; not `NOT_GIVEN`, `None` or nothing). Its session:
`x-session-id`. A request that comes again: `idempotency-key`, `x-stainless-retry-count`. Traces: `traceparent`,
`tracestate`. Those that say something of other servers:
"""
OPERATORS = """
## The operator's listener

A port of its own, with keys of its own (`admin` in the configuration, `docs/admin.md`); none of these routes is open
where requests come in. Parameters of the query are named in the description.
"""


def page() -> str:
    """The text of docs/api.md."""
    app = create_app(_NoEngine(), RequestLimits(), keys=ApiKeys())  # type: ignore[arg-type]
    app.include_router(fleet_routes(_NoEngine()))  # type: ignore[arg-type]
    document = app.openapi()
    headers = table(("ignored", "why"), [(f"`{name}`", cell(why)) for name, why in IGNORED_HEADERS.items()])
    out = [
        INTRODUCTION + HEADERS,
        *headers,
        "\n## Routes\n",
        *table(("route", "what it does"), _routes(document)),
        *_objects(document, "##"),
        SOCKETS.rstrip("\n"),
        "",
        *table(("field", "type", "default", "meaning"), _own_fields()),
        SOCKETS_END,
    ]
    config = ServeConfig(models=(ModelConfig(name="m"),))
    operators = create_admin_app(_NoEngine(), config, ApiKeys(), TenantLabels()).openapi()  # type: ignore[arg-type]
    out += [OPERATORS, *table(("route", "what it does"), _routes(operators)), *_objects(operators, "###")]
    return "\n".join(out) + "\n"


def _own_fields() -> list[tuple[str, ...]]:
    """The fields that a message of a websocket has and the body of a POST has not."""
    schema = ResponseCreate.model_json_schema(ref_template=REF + "{model}")
    own = {name: field for name, field in schema["properties"].items() if name not in ResponsesRequest.model_fields}
    return list(_fields(schema | {"properties": own}))


def _objects(document: Mapping[str, Any], level: str) -> Iterator[str]:
    """A table for each body of a document, and for what is in them."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    found: dict[str, type[BaseModel]] = {}
    for model in bodies():
        _models(model, found)
    asked = dict(_bodies(document))
    for name, routes in asked.items():
        yield f"\n{level} {' and '.join(f'`{route}`' for route in routes)}\n"
        yield from table(("field", "type", "default", "meaning"), _fields(schemas[name]))
        yield from _unread(found.get(name))
    nested = sorted(set(schemas) - set(asked) - {"HTTPValidationError", "ValidationError"})
    yield f"\n{level} Objects in {'requests' if level == '##' else 'these'}\n"
    for name in nested:
        if schemas[name].get("properties"):
            about = schemas[name].get("description", "").splitlines()
            yield from [f"\n{level}# {name}\n", *about[:1], ""]
            yield from table(("field", "type", "default", "meaning"), _fields(schemas[name]))
            yield from _unread(found.get(name))


def _unread(model: type[BaseModel] | None) -> Iterator[str]:
    """Tables of the fields that a model knows and does not read."""
    for word in ("refused", "ignored"):
        if reasons := _reasons(model, word):
            yield from ["", *table((word, "why"), reasons)]


def _routes(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"`{method.upper()} {path}`", operation.get("description", "").splitlines()[0]


def _bodies(document: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The name of each body's schema, and the routes that take it."""
    found: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if ref := content.get("schema", {}).get("$ref"):
                found.setdefault(ref.removeprefix(REF), []).append(f"{method.upper()} {path}")
    yield from found.items()


def _reasons(model: Any, word: str) -> list[tuple[str, ...]]:
    """One of the two tables of fields that a model does not read."""
    reasons: Mapping[str, str] = getattr(model, word, {})
    return [(f"`{field}`", cell(why)) for field, why in sorted(reasons.items())]


def _models(model: type[BaseModel], found: dict[str, type[BaseModel]]) -> None:
    """Add a model to `found`, and those of its fields."""
    if model.__name__ not in found:
        found[model.__name__] = model
        for field in model.model_fields.values():
            for part in _parts(field.annotation):
                _models(part, found)


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else f"`{json.dumps(field['default'])}`" if "default" in field else ""
        yield f"`{name}`", _type(field), "" if default == "`null`" else default, cell(field.get("description", ""))


def _type(field: Mapping[str, Any]) -> str:
    """A field's type in a few words."""
    if "$ref" in field:
        return str(field["$ref"].removeprefix(REF))
    for union in ("anyOf", "oneOf"):
        if union in field:
            kinds = [_type(kind) for kind in field[union] if kind.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in field or "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field['items'])}" if field.get("items") else "list"
    return cell(f"{field.get('type', 'any')}{_bounds(field)}")


def _bounds(field: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return "".join(
        f" {sign} {field[name]:g}" for name, sign in signs.items() if name in field and abs(field[name]) < 2**53
    )


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only say whether the page is stale")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
