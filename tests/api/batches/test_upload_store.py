"""Files that come in parts, as the openai SDK sends them."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from app.api.batches import upload_store
from app.api.server.app import create_app
from app.api.store.kinds import store_limits
from app.api.store.local_store import LocalStore
from app.api.store.tenant_store import TenantStore, ask_local
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests import limits
from tests.api.store.shaky import Nth, shaky_stores

LINES = [
    {
        "custom_id": f"r{i}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": f"number {i} " * 20}], "max_tokens": 2},
    }
    for i in range(5)
]
CONTENT = "".join(json.dumps(line) + "\n" for line in LINES).encode()
MD5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
JSONL = "application/jsonl"


def begin(sdk: openai.OpenAI, size: int = len(CONTENT), **fields: Any) -> Any:
    return sdk.uploads.create(
        **{"bytes": size, "filename": "x.jsonl", "mime_type": JSONL, "purpose": "batch", **fields}
    )


def halves(sdk: openai.OpenAI, upload_id: str) -> list[str]:
    """The parts of the content, sent in the wrong order."""
    second = sdk.uploads.parts.create(upload_id, data=CONTENT[700:])
    first = sdk.uploads.parts.create(upload_id, data=CONTENT[:700])
    assert (first.object, first.upload_id) == ("upload.part", upload_id)
    return [first.id, second.id]


def test_the_sdk_s_chunks_become_a_file_and_a_batch(sdk: openai.OpenAI, tmp_path: Path, wait_for: Any) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(CONTENT)
    upload = sdk.uploads.upload_file_chunked(file=path, mime_type=JSONL, purpose="batch", part_size=500, md5=MD5)
    assert (upload.status, upload.bytes, upload.filename) == ("completed", len(CONTENT), "requests.jsonl")
    assert upload.file is not None
    assert (upload.file.bytes, upload.file.purpose, upload.file.filename) == (len(CONTENT), "batch", "requests.jsonl")
    assert sdk.files.content(upload.file.id).content == CONTENT
    assert sdk.files.retrieve(upload.file.id).to_dict() == upload.file.to_dict()
    assert [file.id for file in sdk.files.list()] == [upload.file.id]
    batch = sdk.batches.create(input_file_id=upload.file.id, endpoint="/v1/chat/completions", completion_window="24h")
    wait_for(lambda: sdk.batches.retrieve(batch.id).status == "completed", "the batch's end")
    done = sdk.batches.retrieve(batch.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (5, 0)


def test_parts_are_joined_in_the_order_that_is_named(sdk: openai.OpenAI) -> None:
    upload = begin(sdk, expires_after={"anchor": "created_at", "seconds": 3600})
    assert (upload.status, upload.object, upload.file) == ("pending", "upload", None)
    assert upload.expires_at == upload.created_at + 3600
    parts = halves(sdk, upload.id)
    spare = sdk.uploads.parts.create(upload.id, data=b"sent twice")
    for hidden in (upload.id, *parts):
        with pytest.raises(openai.NotFoundError):
            sdk.files.retrieve(hidden)
    assert sdk.files.list().data == [], "what is under way is no file"
    done = sdk.uploads.complete(upload.id, part_ids=parts)
    assert done.file is not None
    assert done.file.expires_at == done.file.created_at + 3600
    assert sdk.files.content(done.file.id).content == CONTENT
    assert sdk.uploads.complete(upload.id, part_ids=parts).to_dict() == done.to_dict(), "one that is sent again"
    for call in (
        lambda: sdk.uploads.parts.create(upload.id, data=b"x"),
        lambda: sdk.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.BadRequestError, match="the upload is completed"):
            call()
    assert spare.id


def test_a_cancelled_one_gives_its_room_back(client: Any, http_to: Any) -> None:
    http = http_to(create_app(client, RequestLimits(), IngressConfig(max_tenant_file_store_bytes=4000)))
    sdk = openai.OpenAI(api_key="none", base_url=f"{http.base_url}/v1", max_retries=0)
    for _ in range(3):
        upload = begin(sdk)
        parts = halves(sdk, upload.id)
        assert sdk.uploads.cancel(upload.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="the upload is cancelled"):
            sdk.uploads.complete(upload.id, part_ids=parts)
        with pytest.raises(openai.BadRequestError, match="the upload is cancelled"):
            sdk.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.APIStatusError, match="no room"):
        begin(sdk, 4001)
    upload = begin(sdk)
    done = sdk.uploads.complete(upload.id, part_ids=halves(sdk, upload.id), md5=MD5.upper())
    assert done.status == "completed"
    sdk.close()


def test_one_that_is_too_late_has_expired(sdk: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = begin(sdk)
    parts = halves(sdk, upload.id)
    monkeypatch.setattr(upload_store, "time", SimpleNamespace(time=lambda: upload.expires_at + 1.0))
    for call in (
        lambda: sdk.uploads.parts.create(upload.id, data=b"x"),
        lambda: sdk.uploads.complete(upload.id, part_ids=parts),
        lambda: sdk.uploads.cancel(upload.id),
    ):
        with pytest.raises(openai.BadRequestError, match="the upload is expired"):
            call()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"bytes": 0}, 400, "bytes"),
        ({"bytes": 2000}, 413, "bytes"),
        ({"bytes": 1 << 70}, 400, "bytes"),
        ({"purpose": "assistants"}, 400, "purpose"),
        ({"filename": "x" * 256}, 400, "filename"),
        ({"mime_type": None}, 400, "mime_type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "expires_after.seconds"),
        ({"foo": 1}, 400, "foo"),
    ],
)
def test_refusals_of_an_upload(client: Any, http_to: Any, fields: dict[str, Any], status: int, param: str) -> None:
    http = http_to(create_app(client, RequestLimits(max_file_bytes=1999)))
    body = {"bytes": 10, "filename": "x", "mime_type": JSONL, "purpose": "batch"} | fields
    refused = http.post("/v1/uploads", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("ids", "md5", "param"),
    [
        ([], None, "part_ids"),
        (["A"], None, "part_ids"),
        (["A", "A"], None, "part_ids"),
        (["A", "B", "part_1"], None, "part_ids.2"),
        (["A", "B"], "0" * 32, "md5"),
        (["B", "A"], MD5, "md5"),
        (["A", "B"], "0" * 31, "md5"),
    ],
)
def test_refusals_of_an_end(
    sdk: openai.OpenAI, http: httpx.Client, ids: list[str], md5: str | None, param: str
) -> None:
    upload = begin(sdk)
    named = dict(zip("AB", halves(sdk, upload.id), strict=True))
    body = {"part_ids": [named.get(one, one) for one in ids], "md5": md5}
    refused = http.post(f"/v1/uploads/{upload.id}/complete", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    body = {"part_ids": list(named.values()), "md5": MD5}
    assert http.post(f"/v1/uploads/{upload.id}/complete", json=body).json()["status"] == "completed", "a second try"


@pytest.mark.parametrize(
    ("form", "status", "param"),
    [
        ({"files": {"data": ("x", b"")}}, 400, "data"),
        ({"files": {"file": ("x", b"x")}}, 400, "file"),
        ({"files": {"data": ("x", b"x")}, "data": {"purpose": "batch"}}, 400, "purpose"),
        ({"files": {"data": ("x", b"x" * 11)}}, 400, "data"),
        ({"data": {"data": "x"}}, 400, None),
    ],
)
def test_refusals_of_a_part(client: Any, http_to: Any, form: Any, status: int, param: str | None) -> None:
    http = http_to(create_app(client, RequestLimits()))
    body = {"bytes": 10, "filename": "x", "mime_type": JSONL, "purpose": "batch"}
    upload_id = http.post("/v1/uploads", json=body).json()["id"]
    refused = http.post(f"/v1/uploads/{upload_id}/parts", **form)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    for path in ("parts", "complete", "cancel"):
        sent: dict[str, Any] = {"files": {"data": ("x", b"x")}} if path == "parts" else {"json": {"part_ids": ["a"]}}
        assert http.post(f"/v1/uploads/upload_1/{path}", **sent).status_code == 404
        assert http.post(f"/v1/uploads/{'x' * 9}/{path}", **sent).status_code == 404


def test_a_part_may_be_larger_than_other_bodies(client: Any, http_to: Any) -> None:
    http = http_to(create_app(client, RequestLimits(max_body_bytes=1000, max_file_bytes=200_000)))
    body = {"bytes": 150_000, "filename": "x", "mime_type": JSONL, "purpose": "batch"}
    upload_id = http.post("/v1/uploads", json=body).json()["id"]
    part = http.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("x", io.BytesIO(b"x" * 150_000))})
    assert part.status_code == 200, part.text
    too_large = http.post(f"/v1/uploads/{upload_id}/parts", files={"data": ("x", io.BytesIO(b"x" * 300_000))})
    assert too_large.status_code == 413
    other = http.post("/v1/uploads", json=body | {"filename": "x" * 2000})
    assert other.status_code == 413, "its other routes take no more than any"


@pytest.mark.parametrize("method", ["join", "put", "delete", "page", "get"])
@pytest.mark.parametrize("fate", ["undone", "done"])
def test_an_end_whose_answer_is_lost_is_asked_for_again(client: Any, http_to: Any, method: str, fate: Any) -> None:
    """Whatever call of the store fails, once, while it is completed: the second try gives the file."""
    is_completing = False
    nth = Nth(1, fate, lambda kind, name: is_completing and kind == "files" and name == method)
    http = http_to(create_app(client, RequestLimits(), IngressConfig(), None, shaky_stores(IngressConfig(), nth)))
    with openai.OpenAI(api_key="none", base_url=f"{http.base_url}/v1", max_retries=0) as sdk:
        upload = begin(sdk)
        parts = halves(sdk, upload.id)
        sdk.uploads.parts.create(upload.id, data=b"spare")
        is_completing = True
        with pytest.raises(openai.APIStatusError):
            sdk.uploads.complete(upload.id, part_ids=parts)
        done = sdk.uploads.complete(upload.id, part_ids=parts)
        assert done.file is not None
        assert sdk.files.content(done.file.id).content == CONTENT
        assert [file.id for file in sdk.files.list()] == [done.file.id]


@pytest.mark.parametrize("ended", ["cancelled", "completed"])
def test_a_part_that_comes_while_the_upload_ends_is_refused(client: Any, http_to: Any, ended: str) -> None:
    """However much of it the store has by then; nothing of it is left."""
    kept = LocalStore(store_limits(IngressConfig())["files"])
    ending: list[Any] = []

    def stores(kind: str) -> TenantStore:
        return TenantStore(ask if kind == "files" else ask_local(LocalStore(store_limits(IngressConfig())[kind])))

    async def ask(method: str, *arguments: Any, **named: Any) -> Any:
        if method == "append" and ending:
            await ending.pop()()
        return getattr(kept, method)(*arguments, **named)

    app = create_app(client, RequestLimits(), IngressConfig(), None, stores)
    with openai.OpenAI(api_key="none", base_url=f"{http_to(app).base_url}/v1", max_retries=0) as sdk:
        upload = begin(sdk)
        parts = halves(sdk, upload.id)
        body = {"json": {"part_ids": parts}} if ended == "completed" else {}

        async def end() -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                path = "complete" if ended == "completed" else "cancel"
                assert (await http.post(f"/v1/uploads/{upload.id}/{path}", **body)).json()["status"] == ended

        ending.append(end)
        with pytest.raises(openai.BadRequestError, match="the upload has ended meanwhile"):
            sdk.uploads.parts.create(upload.id, data=b"late")
        assert len(kept) == (2 if ended == "completed" else 1), "the upload, and its file"


def test_tenants_have_their_own(client: Any) -> None:
    keys = {name: f"key-of-{name}" for name in ("alice", "bob")}
    hashes = [f"{name}=sha256:{hashlib.sha256(key.encode()).hexdigest()}" for name, key in keys.items()]

    async def go() -> None:
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(client, RequestLimits(), IngressConfig(api_key_hashes=hashes)))
        )
        alice, bob = (
            openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http, max_retries=0)
            for key in keys.values()
        )
        upload = await alice.uploads.create(bytes=1, filename="x", mime_type=JSONL, purpose="batch")
        with pytest.raises(openai.NotFoundError):
            await bob.uploads.parts.create(upload.id, data=b"x")
        with pytest.raises(openai.NotFoundError):
            await bob.uploads.cancel(upload.id)
        part = await alice.uploads.parts.create(upload.id, data=b"x")
        with pytest.raises(openai.NotFoundError):
            await bob.uploads.complete(upload.id, part_ids=[part.id])
        assert (await alice.uploads.complete(upload.id, part_ids=[part.id])).status == "completed"

    limits.run(go())
