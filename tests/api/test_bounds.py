"""Every string, list and number that a client can send has a bound; the body models are walked, so a new field that
has none fails here."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pydantic
import pytest

from app.api.chat.messages import TextPart
from app.api.chat.tools import ToolCall
from app.api.endpoints import bodies
from app.api.http.strict_models import StrictModel
from app.api.server.app import create_app
from app.api.server.debug import RouteRequest
from app.bounds import MAX_NAME_CHARS, MAX_SENT_BACK_CHARS, MAX_TEXT_CHARS, Count, Text
from app.config.limits import RequestLimits
from app.records.pooling_info import PoolingInfo
from app.records.sampling_params import SamplingParams
from tests.api.json_routes import TEXT_BODIES, WITHOUT_TEXT
from tests.api.json_routes import bodies as bodies_of

EXCEPTIONS = {
    # Each conversation is read again, as the body of a chat.
    ("ChatBatchRequest.messages", "any"),
    ("ChatBatchRequest", "extra fields"),
}
COLLECTIONS = ("list", "set", "frozenset", "dict")
CONTAINED = ("fields", "choices", "steps", "items_schema")


class Walk:
    """Every schema inside of a model's core schema, and which of them bound nothing."""

    def __init__(self, model: type[pydantic.BaseModel]) -> None:
        self.unbounded: set[tuple[str, str]] = set()
        self.num_seen = 0
        self._models: set[type] = set()
        self._definitions: dict[str, Any] = {}
        self._visit(model.__pydantic_core_schema__, "", {})

    def _visit(self, schema: Any, where: str, config: Any) -> None:
        kind = schema.get("type")
        if kind == "definitions":
            self._definitions |= {known["ref"]: known for known in schema["definitions"]}
        elif kind == "definition-ref":
            schema = self._definitions[schema["schema_ref"]]
            kind = schema["type"]
        if kind == "model":
            if schema["cls"] in self._models:
                return
            self._models.add(schema["cls"])
            where, config = schema["cls"].__name__, schema.get("config", {})
        self.num_seen += 1
        if fault := _fault(schema, config):
            self.unbounded.add((where, fault))
        for name, part in _parts(schema):
            self._visit(part, f"{where}.{name}" if name else where, config)


def _fault(schema: Any, config: Any) -> str | None:
    """What has no bound in one node of a core schema."""
    kind = schema["type"]
    if kind == "str":
        return None if "max_length" in schema or "str_max_length" in config else kind
    if kind in COLLECTIONS or (kind == "tuple" and schema.get("variadic_item_index") is not None):
        return None if "max_length" in schema else kind
    if kind in ("int", "float"):
        return None if {"ge", "gt"} & schema.keys() and {"le", "lt"} & schema.keys() else kind
    if kind == "model" and config.get("extra_fields_behavior") == "allow":
        return "extra fields"
    return kind if kind in ("any", "bytes", "url", "multi-host-url", "decimal", "complex", "generator") else None


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside of one, with their fields' names ("" where there is none)."""
    for key, value in schema.items():
        if key in ("metadata", "serialization", "definitions"):
            continue
        if schema["type"] == "dict" and key == "values_schema" and value["type"] == "any":
            # Values of free-form objects (JSON schemas, arguments, names for a template) are bounded by the body's
            # counts of values and members and by its depth (app/api/http/body.py, tests/api/test_guards.py).
            continue
        if isinstance(value, dict) and "type" in value and isinstance(value["type"], str):
            yield "", value
        elif isinstance(value, dict) and key in CONTAINED:
            yield from ((name if key == "fields" else "", part) for name, part in value.items() if _is_schema(part))
        elif isinstance(value, list) and key in CONTAINED:
            members = (part[0] if isinstance(part, tuple) else part for part in value)
            yield from (("", part) for part in members if _is_schema(part))


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) and "type" in value


@pytest.mark.parametrize("model", [*bodies(), RouteRequest, SamplingParams], ids=lambda model: model.__name__)
def test_every_field_has_a_bound(model: type[pydantic.BaseModel]) -> None:
    walk = Walk(model)
    assert walk.unbounded <= EXCEPTIONS
    assert walk.num_seen > len(model.model_fields)


class Inner(pydantic.BaseModel):
    """No bound of its own, nor one by default."""

    name: str


@pytest.mark.parametrize(
    ("annotation", "fault"),
    [
        (list[Text], "list"),
        (dict[Text, Count], "dict"),
        (tuple[Text, ...] | None, "tuple"),
        (frozenset[Text], "frozenset"),
        (int, "int"),
        (float | None, "float"),
        (bytes, "bytes"),
        (Any, "any"),
        (Inner, "str"),
        (Text | list[Inner] | None, "list"),
    ],
)
def test_the_walk_finds_what_has_no_bound(annotation: Any, fault: str) -> None:
    model = pydantic.create_model("Outer", __base__=StrictModel, field=(annotation, ...))
    assert fault in {kind for _, kind in Walk(model).unbounded}


@pytest.mark.parametrize(
    ("model", "value", "bound"),
    [
        (ToolCall, lambda text: {"id": text, "function": {"name": "f"}}, MAX_SENT_BACK_CHARS),
        (TextPart, lambda text: {"type": "text", "text": text}, MAX_TEXT_CHARS),
        (RouteRequest, lambda text: {"prompt": "hi", "cache_salt": text}, MAX_NAME_CHARS),
    ],
)
def test_a_text_s_own_bound_wins_over_the_default_of_its_model(model: Any, value: Any, bound: int) -> None:
    model.model_validate(value("x" * bound))
    with pytest.raises(pydantic.ValidationError) as refused:
        model.model_validate(value("x" * (bound + 1)))
    assert refused.value.errors(include_input=False)[0]["type"] == "string_too_long"


def test_a_server_cannot_promise_longer_texts_than_a_field_takes() -> None:
    RequestLimits(max_prompt_chars=MAX_TEXT_CHARS)
    with pytest.raises(pydantic.ValidationError, match="max_prompt_chars"):
        RequestLimits(max_prompt_chars=MAX_TEXT_CHARS + 1)


LONG = "x" * 100_000
LONG_ELEMENTS: list[Any] = [
    LONG,
    10**4000,
    [LONG],
    [0] * 30_000,
    {LONG: 1},
    {"type": LONG, "role": LONG, "text": LONG, "content": LONG, "name": LONG, "function": {"name": LONG}},
    {"role": "user", "content": [{"type": "text", "text": LONG}]},
    {"type": "function", "function": {"name": "f", "description": LONG, "parameters": {"enum": [LONG]}}},
]
MAX_ANSWER_BYTES = 4096
SAME_BODY = {"/v1/score", "/rerank", "/v2/rerank"}


@pytest.fixture
def app(served_model: Any, make_client: Any) -> Any:
    embeds = PoolingInfo("last", True, ("embed", "token_embed"), embedding_size=8)
    classifies = PoolingInfo("last", True, ("classify",), labels=("a", "b"))
    models = [
        dataclasses.replace(served_model, name="m"),
        dataclasses.replace(served_model, name="embed", aliases=(), pooling=embeds),
        dataclasses.replace(served_model, name="classify", aliases=(), pooling=classifies),
    ]
    return create_app(make_client(*models), RequestLimits())


def collections_of(document: Any, path: str) -> dict[str, str]:
    """The fields of a route's body that may be a list or an object, by what they may be."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = document["components"]["schemas"][content["$ref"].rpartition("/")[2]]["properties"]
    found = {}
    for name, field in properties.items():
        text = json.dumps(field)
        if '"array"' in text or '"object"' in text or "$ref" in text:
            found[name] = "array" if '"array"' in text else "object"
    return found


@pytest.mark.parametrize("path", sorted((TEXT_BODIES.keys() | WITHOUT_TEXT) - SAME_BODY))
def test_a_long_element_of_any_list_is_refused_in_few_words(app: Any, path: str) -> None:
    """A list is bounded in what its elements are, not only in how many; the answer does not say them back."""
    valid = bodies_of(path, "hi")[0] if path in TEXT_BODIES else {}
    found = collections_of(app.openapi(), path)
    assert found

    async def send() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for name, kind in found.items():
                for element in LONG_ELEMENTS:
                    body = {**valid, name: [element] if kind == "array" else {"k": element}}
                    answer = await http.post(path, json=body)
                    assert answer.status_code in (200, 400, 404), (name, str(element)[:80], answer.text[:300])
                    assert len(answer.content) < MAX_ANSWER_BYTES, (name, str(element)[:80], answer.text[:300])

    asyncio.run(send())
