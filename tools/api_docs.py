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
from typing import Any

from app.api.admin.app import create_admin_app
from app.api.app import create_app
from app.api.auth import ApiKeys
from app.api.endpoints import bodies
from app.api.fleet import fleet_routes
from app.config import ModelConfig, RequestLimits, ServeConfig
from tools.markdown import cell, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
REF = "#/components/schemas/"
INTRODUCTION = """# HTTP API

This page is written by `python -m tools.api_docs`; a test fails when it is stale.

Every request body is closed: a field that is not listed here is a 400 that names it. Only what messages, content parts
and items of an earlier conversation carry besides is ignored, as clients send them back with fields of their own.
*Refused* means that the server knows the field and says why it does not take it. Errors have the shape of the dialect
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
"""


class _NoEngine:
    """The application is built, but never asked."""

    models: Mapping[str, Any] = {}


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
    out = [INTRODUCTION, "## Routes\n", *table(("route", "what it does"), _routes(document)), *_objects(document, "##")]
    config = ServeConfig(models=(ModelConfig(name="m"),))
    operators = create_admin_app(_NoEngine(), config, ApiKeys()).openapi()  # type: ignore[arg-type]
    out += [OPERATORS, *table(("route", "what it does"), _routes(operators)), *_objects(operators, "###")]
    return "\n".join(out) + "\n"


def _objects(document: Mapping[str, Any], level: str) -> Iterator[str]:
    """A table for each body of a document, and for what is in them."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    bodies = dict(_bodies(document))
    for name, routes in bodies.items():
        yield f"\n{level} {' and '.join(f'`{route}`' for route in routes)}\n"
        yield from table(("field", "type", "default", "meaning"), _fields(schemas[name]))
        if refused := _refused(name):
            yield from ["", *table(("refused", "why"), refused)]
    nested = sorted(set(schemas) - set(bodies) - {"HTTPValidationError", "ValidationError"})
    yield f"\n{level} Objects in {'requests' if level == '##' else 'these'}\n"
    for name in nested:
        if schemas[name].get("properties"):
            about = schemas[name].get("description", "").splitlines()
            yield from [f"\n{level}# {name}\n", *about[:1], ""]
            yield from table(("field", "type", "default", "meaning"), _fields(schemas[name]))


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


def _refused(name: str) -> list[tuple[str, ...]]:
    body = next((body for body in bodies() if body.__name__ == name), None)
    refused: Mapping[str, str] = getattr(body, "refused", {})
    return [(f"`{field}`", cell(why)) for field, why in sorted(refused.items())]


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
