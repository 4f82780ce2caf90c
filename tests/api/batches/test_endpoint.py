"""Files and batches through the real SDK: OpenAI's formats, bounds, cancel, expiry, work of an ingress that died."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from app.api.batches.batch import Batch, BatchBody
from app.api.batches.file_store import FileStore
from app.api.server.app import create_app
from app.api.store.entries import Lease
from app.api.store.kinds import local_stores
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from tests import limits

TEXT = "The quick brown fox."
Wait = Callable[..., None]
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def say(client: Any, served_model: Any) -> None:
    client.script = lambda request: served_model.tokenizer.encode(TEXT, False)


def line(name: Any, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = body or {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in lines)


def upload(sdk: openai.OpenAI, *lines: Any) -> Any:
    return sdk.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")


def create(sdk: openai.OpenAI, file_id: str, endpoint: Any = CHAT, **fields: Any) -> Any:
    return sdk.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **fields)


def ended(sdk: openai.OpenAI, batch: Any, wait_for: Wait) -> Any:
    wait_for(lambda: sdk.batches.retrieve(batch.id).status not in ("validating", "in_progress", "finalizing"))
    return sdk.batches.retrieve(batch.id)


def results(sdk: openai.OpenAI, file_id: str) -> dict[str, Any]:
    return {entry["custom_id"]: entry for entry in map(json.loads, sdk.files.content(file_id).text.splitlines())}


def test_files(sdk: openai.OpenAI, http: httpx.Client) -> None:
    content = jsonl(*(line(str(i)) for i in range(20)))
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch", expires_after=after)
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in.jsonl", "batch")
    assert file.expires_at == file.created_at + 3600
    assert sdk.files.retrieve(file.id) == file
    assert sdk.files.content(file.id).content == content
    second = sdk.files.create(file=("two.jsonl", content), purpose="batch")
    assert [found.id for found in sdk.files.list()] == [second.id, file.id]
    page = sdk.files.list(limit=1, order="asc", purpose="batch")
    assert ([found.id for found in page.data], page.has_more) == ([file.id], True)
    assert [found.id for found in page] == [file.id, second.id], "the SDK asks for the next page"
    assert sdk.files.delete(file.id).deleted
    for gone in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            gone(file.id)


@pytest.mark.parametrize(
    ("data", "file", "status", "param"),
    [
        ({"purpose": "batch"}, None, 400, "file"),
        ({"purpose": "assistants"}, b"x", 400, "purpose"),
        ({"purpose": "batch"}, b"", 400, "file"),
        ({"purpose": "batch", "foo": "1"}, b"x", 400, "foo"),
        ({"purpose": "batch", "expires_after[anchor]": "x"}, b"x", 400, "expires_after.anchor"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, b"x", 400, "expires_after.seconds"),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 900},
            b"x",
            400,
            "expires_after.seconds",
        ),
        ({"purpose": "b" * 2000}, b"x", 400, None),
        ({"purpose": "batch"}, b"x" * 2000, 413, "file"),
        ({"purpose": "batch"}, b"x" * 200_000, 413, None),
        ({"purpose": "batch"}, b"x" * 900, 413, None),
    ],
)
def test_what_is_no_file(client: Any, http_to: Any, data: Any, file: Any, status: int, param: Any) -> None:
    limits = RequestLimits(max_file_bytes=1000)
    config = IngressConfig(max_tenant_file_store_bytes=800)
    http = http_to(create_app(client, limits, config))
    files: Any = {name: (None, value) for name, value in data.items()}
    response = http.post("/v1/files", files=files | ({"file": ("x", file)} if file is not None else {}))
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert http.post("/v1/files", data=data).status_code == 400, "a form of another kind"
    assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    "body",
    [b"no boundary", b"--x\r\nContent[0]: form-data\r\n\r\n1\r\n--x--", b"--x\r\n\r\n1", b"--xy", b"", b"\r\n--x\x00"],
)
def test_a_form_that_is_none(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/files", content=body, headers={"Content-Type": "multipart/form-data; boundary=x"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_batch(sdk: openai.OpenAI, client: Any, wait_for: Wait) -> None:
    wrong = line("wrong", model="m", messages=[{"role": "user", "content": "hi"}], foo=1)
    file = upload(sdk, *(line(f"r{i}") for i in range(5)), wrong)
    batch = create(sdk, file.id, metadata={"k": "v"})
    assert (batch.object, batch.endpoint, batch.input_file_id) == ("batch", CHAT, file.id)
    done = ended(sdk, batch, wait_for)
    assert (done.status, done.metadata, done.errors) == ("completed", {"k": "v"}, None)
    assert done.request_counts.to_dict() == {"total": 6, "completed": 5, "failed": 1}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at < done.expires_at
    good, bad = results(sdk, done.output_file_id), results(sdk, done.error_file_id)
    assert sorted(good) == [f"r{i}" for i in range(5)]
    response = good["r3"]["response"]
    assert (response["status_code"], good["r3"]["error"], bool(response["request_id"])) == (200, None, True)
    assert response["body"]["choices"][0]["message"]["content"] == TEXT
    assert bad["wrong"]["response"]["status_code"] == 400
    assert bad["wrong"]["response"]["body"]["error"]["param"] == "foo"
    assert all(request.placement.priority > 0 for request in client.requests)
    assert [found.id for found in sdk.batches.list()] == [batch.id]
    assert sdk.files.retrieve(done.output_file_id).purpose == "batch_output"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        create(sdk, done.output_file_id)
    with pytest.raises(openai.BadRequestError, match="is completed"):
        sdk.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("url", "body"), [("/v1/completions", {"prompt": "hi", "max_tokens": 4}), ("/v1/responses", {"input": "hi"})]
)
def test_other_endpoints(sdk: openai.OpenAI, wait_for: Wait, url: Any, body: Any) -> None:
    done = ended(sdk, create(sdk, upload(sdk, line("a", url, **body)).id, url), wait_for)
    assert done.request_counts.completed == 1
    assert results(sdk, done.output_file_id)["a"]["response"]["body"]["id"]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a", "/v1/completions", prompt="x")], "mismatched_endpoint", 1),
        ([line("a"), {"custom_id": "b"}], "invalid_line", 2),
        ([line("a") | {"url": []}], "invalid_line", 1),
        ([line("a", model="m", messages=[], stream=True)], "invalid_line", 1),
        ([[]], "invalid_line", 1),
        ([line(str(i)) for i in range(9)], "too_many_requests", None),
    ],
)
def test_a_file_that_is_no_batch(
    client: Any, http_to: Any, wait_for: Wait, lines: Any, code: str, number: int | None
) -> None:
    http = http_to(create_app(client, RequestLimits(), IngressConfig(max_batch_requests=8)))
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        failed = ended(sdk, create(sdk, upload(sdk, *lines).id), wait_for)
    assert failed.status == "failed"
    assert (failed.errors.data[0].code, failed.errors.data[0].line) == (code, number)
    assert client.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"completion_window": "9" * 5000}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, f"metadata.{'k' * 65}"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"foo": 1}, "foo"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, sdk: openai.OpenAI, fields: Any, param: str) -> None:
    body = {"input_file_id": upload(sdk, line("a")).id, "endpoint": CHAT, "completion_window": "24h", **fields}
    response = http.post("/v1/batches", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    for path in ("/v1/batches", "/v1/files"):
        for params in ({"limit": "1" * 5009}, {"limit": "0"}, {"after": "x" * 5009}, {"after": "nobody"}):
            refused = http.get(path, params=params)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(params))), params


def test_a_cancel_keeps_what_is_done(sdk: openai.OpenAI, client: Any, wait_for: Wait) -> None:
    client.gate = asyncio.Event()
    batch = create(sdk, upload(sdk, *(line(str(i)) for i in range(50))).id)
    assert [file.id for file in sdk.files.list(limit=1).data] == [batch.input_file_id], "results are not shown yet"
    wait_for(lambda: client.num_running == 32)  # no more than max_batch_concurrency at a time
    assert sdk.batches.cancel(batch.id).status == "cancelling"
    wait_for(lambda: sdk.batches.retrieve(batch.id).status == "cancelled")
    assert client.num_running == 0
    assert client.num_aborted == 32
    done = sdk.batches.retrieve(batch.id)
    assert (done.request_counts.total, done.output_file_id) == (50, None)
    assert done.cancelling_at <= done.cancelled_at
    with pytest.raises(openai.NotFoundError):
        sdk.batches.cancel("batch_none")


def test_a_closed_window(sdk: openai.OpenAI, client: Any, monkeypatch: pytest.MonkeyPatch, wait_for: Wait) -> None:
    new = Batch.new

    def brief(body: BatchBody) -> Batch:
        batch = new(body)
        batch.shown["expires_at"] = time.time() + limits.scaled_s(0.2)
        return batch

    monkeypatch.setattr(Batch, "new", brief)
    client.gate = asyncio.Event()
    done = ended(sdk, create(sdk, upload(sdk, line("a"), line("b")).id), wait_for)
    assert (done.status, done.request_counts.failed) == ("expired", 2)
    errors = results(sdk, done.error_file_id)
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}
    assert sorted(errors) == ["a", "b"]


def test_a_full_server_is_asked_again(
    sdk: openai.OpenAI, client: Any, monkeypatch: pytest.MonkeyPatch, wait_for: Wait
) -> None:
    from app.errors import OverloadedError

    monkeypatch.setattr("app.api.batches.run.FIRST_WAIT_S", 0.01)
    client.fail_after = (0, OverloadedError("full"))
    batch = create(sdk, upload(sdk, line("a")).id)
    wait_for(lambda: len(client.requests) >= 2)
    client.fail_after = None
    assert ended(sdk, batch, wait_for).request_counts.completed == 1


def test_another_ingress_takes_over(
    client: Any, make_client: Any, served_model: Any, http_to: Any, wait_for: Wait
) -> None:
    """A batch whose ingress died after two of four lines: the other two are sent, and only they."""
    config = IngressConfig(lease_s=limits.scaled_s(0.5))
    stores = local_stores(config)

    async def left_behind() -> str:
        files = FileStore(stores("files"))
        source = await files.create("", "in.jsonl", "batch", "dead", 1.0)
        await files.entries.append("", source, [jsonl(*(line(str(i)) for i in range(4)))], "dead")
        await files.finish("", source)
        body = BatchBody(input_file_id=source, endpoint="/v1/chat/completions", completion_window="24h")
        batch = Batch.new(body)
        batch.output = await files.create("", "out", "batch_output", "dead", 1.0)
        batch.errors = await files.create("", "err", "batch_output", "dead", 1.0)
        await files.entries.append("", batch.output, [jsonl({"custom_id": "2", "response": {}})], "dead")
        await files.entries.append("", batch.errors, [jsonl({"custom_id": "0", "response": {}})], "dead")
        batch.becomes("in_progress")
        batch.counts["total"] = 4
        await stores("batches").put("", batch.id, batch.dump(), lease=Lease("dead", 0.0))
        return batch.id

    batch_id = limits.run(left_behind())
    http = http_to(create_app(client, RequestLimits(), config, None, stores))
    wait_for(lambda: http.get(f"/v1/batches/{batch_id}").json()["status"] == "completed")
    batch = http.get(f"/v1/batches/{batch_id}").json()
    assert batch["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    content = http.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert json.loads(content.splitlines()[0])["custom_id"] == "2", "what was done stays"
    assert sorted(json.loads(entry)["custom_id"] for entry in content.splitlines()) == ["1", "2", "3"]
    assert len(client.requests) == 2


def test_a_cancel_at_another_ingress_and_bounds(
    client: Any, make_client: Any, served_model: Any, http_to: Any, wait_for: Wait
) -> None:
    config = IngressConfig(lease_s=limits.scaled_s(0.5), max_tenant_batches=1)
    stores = local_stores(config)
    one = http_to(create_app(client, RequestLimits(), config, None, stores))
    two = http_to(create_app(make_client(served_model), RequestLimits(), config, None, stores))
    client.gate = asyncio.Event()
    file_id = one.post("/v1/files", data={"purpose": "batch"}, files={"file": ("x", jsonl(line("a")))}).json()["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch_id = one.post("/v1/batches", json=body).json()["id"]
    refused = two.post("/v1/batches", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    wait_for(lambda: client.num_running == 1)
    assert two.post(f"/v1/batches/{batch_id}/cancel").json()["status"] == "cancelling"
    wait_for(lambda: two.get(f"/v1/batches/{batch_id}").json()["status"] == "cancelled")
    assert client.num_running == 0
    assert two.post("/v1/batches", json=body).status_code == 200
