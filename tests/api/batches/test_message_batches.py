"""/v1/messages/batches as the anthropic SDK sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.messages import MessageBatch

from app.api.batches.batch import Batch
from app.api.batches.message_batches import _counts, shown
from tests import limits
from tests.limits import wait_until


@pytest.fixture
def claude(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=limits.patience_s()) as sdk:
        yield sdk


def request(name: str, **fields: Any) -> Any:
    params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": name, "params": params | fields}


def ended(claude: anthropic.Anthropic, batch_id: str) -> MessageBatch:
    wait_until(lambda: claude.messages.batches.retrieve(batch_id).processing_status == "ended", "the batch's end")
    return claude.messages.batches.retrieve(batch_id)


def test_requests_are_answered_each_by_itself(claude: anthropic.Anthropic, client: Any, served_model: Any) -> None:
    client.script = lambda request: served_model.tokenizer.encode("Quick.", False)
    requests = [request("a"), request("b", max_tokens=-1), request("c", next_week=1), request("d", model="nobody")]
    made = claude.messages.batches.create(requests=requests)
    assert (made.type, made.request_counts.processing) == ("message_batch", 4)
    assert made.id.startswith("msgbatch_")
    done = ended(claude, made.id)
    counts = done.request_counts
    assert (counts.succeeded, counts.errored, counts.processing, counts.canceled, counts.expired) == (2, 2, 0, 0, 0)
    assert done.ended_at is not None
    assert done.created_at <= done.ended_at <= done.expires_at
    found = {line.custom_id: line.result for line in claude.messages.batches.results(made.id)}
    assert {name: result.type for name, result in found.items()} == {
        "a": "succeeded",
        "b": "errored",
        "c": "succeeded",
        "d": "errored",
    }
    assert found["a"].message.content[0].text == "Quick."  # type: ignore[union-attr]
    assert found["b"].error.error.type == "invalid_request_error"  # type: ignore[union-attr]
    assert "max_tokens" in found["b"].error.error.message  # type: ignore[union-attr]
    assert found["d"].error.error.type == "not_found_error"  # type: ignore[union-attr]
    beta = {line.custom_id for line in claude.beta.messages.batches.results(made.id)}
    assert beta == set(found)


def test_lists_are_pages_of_their_own(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    ids = [claude.messages.batches.create(requests=[request("a")]).id for _ in range(3)][::-1]
    assert [batch.id for batch in claude.messages.batches.list(limit=2)] == ids, "pages follow each other"
    assert [batch.id for batch in claude.messages.batches.list(after_id=ids[0], limit=1).data] == [ids[1]]
    page = claude.messages.batches.list(before_id=ids[2], limit=1)
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[1]], True)
    assert http.get("/v1/batches").json()["data"] == [], "OpenAI's are others"
    for name in ("after_id", "before_id"):
        answer = http.get("/v1/messages/batches", params={name: "msgbatch_none"})
        assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_one_that_is_cancelled_says_so_of_each_request(claude: anthropic.Anthropic, client: Any) -> None:
    client.gate = asyncio.Event()
    made = claude.messages.batches.create(requests=[request(f"r{i}") for i in range(5)])
    with pytest.raises(anthropic.AnthropicError, match="results"):
        claude.messages.batches.results(made.id)
    with pytest.raises(anthropic.BadRequestError, match="not ended"):
        claude.messages.batches.delete(made.id)
    cancelled = claude.messages.batches.cancel(made.id)
    assert cancelled.cancel_initiated_at is not None
    done = ended(claude, made.id)
    client.open()
    assert done.request_counts.canceled == 5
    assert [line.result.type for line in claude.messages.batches.results(made.id)] == ["canceled"] * 5
    assert claude.messages.batches.cancel(made.id).processing_status == "ended"


def test_one_that_is_deleted_is_gone_with_its_files(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    made = claude.messages.batches.create(requests=[request("a")])
    ended(claude, made.id)
    assert http.get("/v1/files").json()["data"]
    deleted = claude.messages.batches.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "message_batch_deleted")
    assert http.get("/v1/files").json()["data"] == []
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(made.id)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"requests": []}, "requests"),
        ({"requests": [{"custom_id": "ä", "params": {}}]}, "custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        ({"requests": [request("a"), request("a")]}, "requests.1.custom_id"),
        ({"requests": [request("a", stream=True)]}, "params.stream"),
        ({"requests": [request("a")], "workspace_id": "w"}, "workspaces"),
    ],
)
def test_refusals_name_the_request(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    answer = http.post("/v1/messages/batches", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"], answer.text
    assert http.get("/v1/files").json()["data"] == [], "nothing is left of it"


@pytest.mark.parametrize("path", ["batch_1", "msgbatch_1", "msgbatch_1/results", "x/results"])
def test_what_is_not_there_is_a_404(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/v1/messages/batches/{path}")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_counts_add_up_whatever_the_end() -> None:
    for status in ("completed", "cancelled", "expired", "failed", "in_progress"):
        batch = Batch.made("msgbatch", "file-1", "/v1/messages", 24)
        batch.counts.update(total=10, completed=4, failed=3)
        batch.num_expired = 2
        batch.becomes(status)
        described = shown(batch)
        assert sum(described["request_counts"].values()) == 10
        MessageBatch.model_validate(json.loads(json.dumps(described)))
    assert _counts(batch, True)["expired"] == 2
