"""Every limit through every route and dialect: each cell of tests/api/limit_table.py is a request that is one too many.

A new route, limit or field that has no line there fails here, and says which line to write.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.routing import Route, WebSocketRoute

from app.api.server.app import create_app
from app.bounds import MAX_NAME_CHARS
from app.config.limits import RequestLimits
from app.records.outputs import EngineOutput, PooledResult
from app.records.pooling_info import PoolingInfo
from app.records.request import EngineRequest
from tests.api.conftest import ScriptedClient, served, write_model
from tests.api.json_routes import POOLED, TEXT_BODIES, bodies, json_routes
from tests.api.limit_table import (
    BODIES,
    BOUNDED_OTHERWISE,
    CARRIERS,
    ELSEWHERE,
    EVERYWHERE,
    FORMS,
    UNLIKE,
    Carrier,
    base,
    doors,
    fields_of,
    is_known,
)

JSON = {"content-type": "application/json"}
HERE = "tests/api/limit_table.py"
EMBEDS = PoolingInfo("last", True, ("embed", "token_embed"), embedding_size=8)
CLASSIFIES = PoolingInfo("last", True, ("classify",), labels=("a", "b"))
MAX_ANSWER_BYTES = 4096
FORM_HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'


class AnyClient(ScriptedClient):
    """A ScriptedClient whose pooling models give vectors of ones."""

    async def generate(self, model: str, request: EngineRequest, route: Any = None) -> AsyncIterator[EngineOutput]:
        pooling = self.models[model].pooling
        if pooling is None:
            async for output in super().generate(model, request, route):
                yield output
            return
        self.requests.append(request)
        size = len(pooling.labels) or pooling.embedding_size
        pooled = PooledResult.of(np.ones(size, np.float32) / size**0.5)
        number = request.num_prompts
        yield EngineOutput(
            request.request_id, [], "stop", **({"pooled": pooled} if number == 1 else {"bundled": [pooled] * number})
        )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> AnyClient:
    plain = served(write_model(Path(tmp_path_factory.mktemp("model"))))
    pooling = {"embed": EMBEDS, "classify": CLASSIFIES}
    return AnyClient(plain, *(dataclasses.replace(plain, name=name, pooling=info) for name, info in pooling.items()))


@pytest.fixture(scope="module")
def make_app(client: AnyClient) -> Any:
    @cache
    def make(**limits: Any) -> Any:
        return create_app(client, RequestLimits(**limits))

    return make


@cache
def the_app() -> Any:
    """For its routes and its document only, which the tests' parameters are made of."""
    return create_app(ScriptedClient(), RequestLimits())


@cache
def json_paths() -> list[str]:
    return sorted(json_routes(the_app()))


@cache
def fields(path: str) -> dict[str, Any]:
    return fields_of(the_app().openapi(), path)


def send(app: Any, method: str, path: str, headers: dict[str, str] | None = None, **sent: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request(method, path, headers={**JSON, **(headers or {})}, **sent)

    return asyncio.run(ask())


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert len(answer.content) < MAX_ANSWER_BYTES, answer.text[:300]
    error: dict[str, Any] = answer.json()["error"]
    return error


@dataclasses.dataclass(frozen=True)
class Cell:
    """A request that exceeds one limit."""

    limit: str
    path: str
    carrier: Carrier
    asked: str
    body: dict[str, Any]


def cells() -> Iterator[Any]:
    """Each limit, route and field that carries it, and the routes by which such a body comes there."""
    for limit, line in CARRIERS.items():
        for path in json_paths():
            model = {"model": POOLED[path]} if path in POOLED else {}
            for carrier in line.carriers:
                if carrier.serves(path) and carrier.name in fields(path):
                    body = carrier.body(base(path, carrier)) | model
                    for asked in doors(path, body):
                        cell = Cell(limit, path, carrier, asked, body)
                        yield pytest.param(cell, id=f"{limit}-{asked}-{carrier.name}")


@pytest.mark.parametrize("cell", list(cells()))
def test_one_too_many(client: AnyClient, make_app: Any, cell: Cell) -> None:
    low = CARRIERS[cell.limit].low
    before = len(client.requests)
    refused = send(make_app(**{cell.limit: low}), "POST", cell.asked, json=cell.body)
    assert refused.status_code == 400, refused.text[:500]
    assert len(client.requests) == before, "nothing reaches an engine"
    error = error_of(refused)
    assert error["message"]
    assert cell.asked.startswith("/v1/messages") or cell.carrier.names(error["param"]), error
    taken = send(make_app(**({cell.limit: True} if low is False else {})), "POST", cell.asked, json=cell.body)
    assert taken.status_code == 200, f"without the limit: {taken.text[:500]}"


@pytest.mark.parametrize("path", json_paths())
def test_every_field_has_its_line(path: str) -> None:
    missing = [name for name in fields(path) if not is_known(path, name)]
    assert not missing, (
        f"what bounds these fields of {path}? {missing}: in {HERE}, put each into CARRIERS under the limit that it "
        "can exceed, or into BOUNDED_OTHERWISE"
    )


def test_every_limit_has_its_line() -> None:
    known = CARRIERS.keys() | EVERYWHERE | ELSEWHERE.keys()
    assert RequestLimits.model_fields.keys() == known, f"in {HERE}: a line in CARRIERS, EVERYWHERE or ELSEWHERE"
    assert not CARRIERS.keys() & EVERYWHERE


def test_every_route_that_reads_json_has_a_body() -> None:
    known = TEXT_BODIES.keys() | BODIES.keys()
    missing = set(json_paths()) - known
    assert not missing, f"{missing}: a valid body in tests/api/json_routes.py, or in BODIES of {HERE}"
    assert known == set(json_paths())


def test_no_line_is_left_over() -> None:
    named = {name for path in json_paths() for name in fields(path)}
    plain = {name.removeprefix("sampling_params.") for name in named}
    for names in BOUNDED_OTHERWISE.values():
        for name, _, path in (entry.partition(" of ") for entry in names):
            assert name in (fields(path) if path else plain), f"{HERE}: no body has the field {name}"
    for limit, line in CARRIERS.items():
        for carrier in line.carriers:
            paths = carrier.on or [path for path in json_paths() if carrier.serves(path)]
            assert any(carrier.name in fields(path) for path in paths), f"{HERE}: {limit}: {carrier.name}"


def calls() -> list[tuple[str, str]]:
    """Every method of every route, with something in the place of ids."""
    found = []
    for route in the_app().routes:
        if isinstance(route, WebSocketRoute):  # http/test_sockets.py bounds these
            continue
        assert isinstance(route, Route), f"{route}: only HTTP is tested here; let {HERE} say which test bounds it"
        path = "/".join("x" if part.startswith("{") else part for part in route.path.split("/"))
        found += [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]
    return sorted(set(found))


def reading() -> list[str]:
    """Routes that read a body."""
    return [*json_paths(), *(call.partition(" ")[2] for call in UNLIKE)]


@pytest.mark.parametrize("line", UNLIKE)
def test_routes_unlike_the_others_are_there(line: str) -> None:
    method, path = line.split()
    assert (method, path) in calls()


def test_every_form_has_its_line() -> None:
    described = the_app().openapi()["paths"].items()
    forms = {path for path, route in described if "multipart/form-data" in json.dumps(route.get("post", {}))}
    assert {"/".join("x" if part.startswith("{") else part for part in path.split("/")) for path in forms} == {*FORMS}
    assert {f"POST {path}" for path in FORMS} <= UNLIKE.keys(), f"in {HERE}"


@pytest.mark.parametrize(("method", "path"), calls())
def test_headers(make_app: Any, method: str, path: str) -> None:
    for app, headers in (
        (make_app(max_headers=10), {f"x-{i}": "1" for i in range(10)}),
        (make_app(max_header_bytes=1000), {"x-large": "1" * 1000}),
    ):
        answer = send(app, method, path, headers)
        assert answer.status_code == 431, answer.text[:300]
        assert error_of(answer)["message"]


@pytest.mark.parametrize(("method", "path"), [call for call in calls() if "/x" in call[1]])
def test_ids_in_paths(make_app: Any, method: str, path: str) -> None:
    """However long, they name nothing, and are not said back."""
    for name in ("x" * 60_000, "%00", "%2e%2e%2f" * 8 + "etc%2fpasswd", "..%5c" * 8, "%ff%fe"):
        answer = send(make_app(), method, path.replace("/x", f"/{name}"))
        assert 400 <= answer.status_code < 500, answer.text[:300]
        assert len(answer.content) < MAX_ANSWER_BYTES


@pytest.mark.parametrize("path", reading())
def test_bytes_of_bodies(make_app: Any, path: str) -> None:
    """Declared, and as they come; the rest is not read."""
    num_sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_sent
        if path in FORMS:
            yield FORM_HEAD
        for _ in range(100):
            num_sent += 1
            yield b" " * (1 << 16)

    kind = {"content-type": "multipart/form-data; boundary=x"} if path in FORMS else {}
    app = make_app(max_body_bytes=1 << 17, max_file_bytes=1, max_sound_bytes=1)
    declared = send(app, "POST", path, {**kind, "content-length": str(100 << 20)}, content=b"{}")
    counted = send(app, "POST", path, kind, content=chunks())
    assert [declared.status_code, counted.status_code] == [413, 413]
    assert num_sent < 10


@pytest.mark.parametrize("path", reading())
def test_time_of_bodies(make_app: Any, path: str) -> None:
    async def stall() -> AsyncIterator[bytes]:
        yield b"--x\r\n" if path in FORMS else b"{"
        await asyncio.Event().wait()

    kind = {"content-type": "multipart/form-data; boundary=x"} if path in FORMS else {}
    for limit in ("max_body_s", "max_body_gap_s"):
        assert send(make_app(**{limit: 0.05}), "POST", path, kind, content=stall()).status_code == 408, limit


@pytest.mark.parametrize("path", [path for path in reading() if path not in FORMS])
def test_memory_of_bodies(make_app: Any, path: str) -> None:
    """Files are not held in memory."""
    answer = send(make_app(max_bodies_bytes=1 << 16), "POST", path, content=b" " * (1 << 17))
    assert answer.status_code == 429, answer.text[:300]


@pytest.mark.parametrize("path", [*json_paths(), "/invocations"])
def test_depth_of_bodies(make_app: Any, path: str) -> None:
    own = base(path) if path != "/invocations" else base("/v1/completions")
    for name in own:
        deep = f'{{"{name}": ' + "[" * 9 + "1" + "]" * 9 + "}"
        answer = send(make_app(max_json_depth=8), "POST", path, content=deep.encode())
        assert answer.status_code == 400, answer.text[:300]
        assert path == "/invocations" or "more than 8 deep" in error_of(answer)["message"]


@pytest.mark.parametrize("path", TEXT_BODIES)
def test_texts_of_bodies(client: AnyClient, make_app: Any, path: str) -> None:
    """Of all forms in which a route takes texts; tests/api/test_long_prompts.py shows that none is tokenised."""
    before = len(client.requests)
    for body in bodies(path, "".join(map(str, range(500)))):
        answer = send(make_app(max_prompt_chars=1000), "POST", path, json=body)
        assert answer.status_code == 400
        assert "at most 1000" in error_of(answer)["message"]
    assert len(client.requests) == before


BIG = 1 << 17  # what is longer costs a test more than it shows


def beyond(schema: dict[str, Any]) -> Iterator[Any]:
    """Values that are just outside of a field's schema, if it has one form (or that and null)."""
    forms = [form for form in schema.get("anyOf", [schema]) if form.get("type") != "null"]
    if len(forms) != 1:
        return
    form = forms[0]
    kind = form.get("type")
    if kind == "string" and (most := form.get("maxLength", MAX_NAME_CHARS)) < BIG:
        yield "x" * (most + 1)
    if kind in ("integer", "number"):
        yield from (form[name] + step for name, step in (("maximum", 1), ("minimum", -1)) if name in form)
        yield from (form[name] for name in ("exclusiveMaximum", "exclusiveMinimum") if name in form)
    if kind == "array" and form.get("maxItems", BIG) < BIG:
        yield [1] * (form["maxItems"] + 1)
    if kind == "object" and form.get("maxProperties", BIG) < BIG:
        yield {f"k{i}": "v" for i in range(form["maxProperties"] + 1)}


@pytest.mark.parametrize("path", json_paths())
def test_each_field_s_own_bound(client: AnyClient, make_app: Any, path: str) -> None:
    """One above the most and one below the least that the document says is refused under the field's name."""
    before = len(client.requests)
    for name, schema in fields(path).items():
        for value in beyond(schema):
            body = Carrier(name, value).body(base(path))
            answer = send(make_app(), "POST", path, content=json.dumps(body).encode())
            assert answer.status_code == 400, (name, str(value)[:80], answer.text[:300])
            error = error_of(answer)
            assert name.rpartition(".")[2] in (error.get("param") or error["message"]), (name, error)
    assert len(client.requests) == before


def test_bounds_of_the_document_are_found() -> None:
    found = [name for path in json_paths() for name, schema in fields(path).items() for _ in beyond(schema)]
    assert len(found) > 300
    assert {"n", "seed", "sampling_params.top_p", "cache_salt", "max_output_tokens"} <= set(found)
