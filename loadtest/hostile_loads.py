"""The heaviest that one tenant may ask for within the limits, load by load.

Each load is a function of a tenant's client that returns once it is answered, with the answers' statuses. What goes on
afterwards, it ends before it returns.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import httpx

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FILES, BATCHES = "/v1/files", "/v1/batches"
_JSON = {"Content-Type": "application/json"}
ANSWER_S = 300.0
BATCH_S = 20.0  # a batch runs so long beside its neighbour, then it is cancelled
CHECKS_S = 0.5  # between looks at a batch
NUM_LINES = 50_000
BLANK_BYTES = 30_000_000

Statuses = Counter[str]


class Tenant:
    """One tenant's client."""

    def __init__(
        self, base_url: str, key: str, model: str = "tiny-chat", transport: httpx.BaseTransport | None = None
    ) -> None:
        self.model = model
        self._http = httpx.Client(
            base_url=base_url,
            headers={"Authorization": f"Bearer {key}"},
            transport=transport,
            timeout=ANSWER_S,
            limits=httpx.Limits(max_connections=64),
        )

    def post(self, path: str, body: Any, headers: Mapping[str, str] = MappingProxyType({})) -> httpx.Response:
        """Post JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._http.post(path, content=content, headers={**_JSON, **headers})

    def leave(self, path: str, body: Any) -> None:
        """Post JSON, and go away when the answer begins."""
        with self._http.stream("POST", path, content=json.dumps(body).encode(), headers=_JSON) as answer:
            next(answer.iter_raw(), None)

    def chat(self, **fields: Any) -> httpx.Response:
        """A chat of four tokens."""
        messages = [{"role": "user", "content": "Hi"}]
        return self.post(CHAT, {"model": self.model, "messages": messages, "max_tokens": 4, **fields})

    def upload(self, content: bytes) -> str:
        """The id of a new file."""
        files = {"file": ("lines.jsonl", content)}
        found = self._http.post(FILES, files=files, data={"purpose": "batch"})
        found.raise_for_status()
        return str(found.json()["id"])

    def get(self, path: str) -> Any:
        """The JSON that stands at `path`."""
        return self._http.get(path).json()

    def delete(self, path: str) -> None:
        """Delete what stands at `path`."""
        self._http.delete(path)

    def at_once(self, number: int, call: Callable[[int], httpx.Response], threads: int = 0) -> Statuses:
        """So many calls, all at a time, or `threads` of them."""
        with ThreadPoolExecutor(threads or number) as pool:
            return Counter(pool.map(lambda i: _status(call, i), range(number)))


def _status(call: Callable[[int], httpx.Response], i: int) -> str:
    try:
        return str(call(i).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


def batch(tenant: Tenant) -> Statuses:
    """A batch of as many lines as one may have."""
    body = {"model": tenant.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    lines = (
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body}) for i in range(NUM_LINES)
    )  # fmt: skip
    file_id = tenant.upload("\n".join(lines).encode())
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    answer = tenant.post(BATCHES, asked)
    place = f"{BATCHES}/{answer.json()['id']}"
    end = time.monotonic() + BATCH_S
    while time.monotonic() < end and tenant.get(place)["status"] in ("validating", "in_progress"):
        time.sleep(CHECKS_S)
    tenant.post(f"{place}/cancel", b"")
    while (found := tenant.get(place))["status"] in ("validating", "in_progress", "cancelling", "finalizing"):
        time.sleep(CHECKS_S)
    for name in ("input_file_id", "output_file_id", "error_file_id"):
        if found.get(name):
            tenant.delete(f"{FILES}/{found[name]}")
    return Counter({str(answer.status_code): 1, "lines": found["request_counts"]["completed"]})


def prompt_logprobs(tenant: Tenant) -> Statuses:
    """Twenty logprobs of each token of eight long prompts."""
    body = {"model": tenant.model, "prompt": [5] * 3900, "max_tokens": 1, "prompt_logprobs": 20}
    return tenant.at_once(8, lambda i: tenant.post(COMPLETIONS, body))


def background(tenant: Tenant) -> Statuses:
    """Two hundred responses in the background."""
    body = {"model": tenant.model, "input": "Hi", "background": True, "max_output_tokens": 300}
    kept: list[str] = []

    def begin(_: int) -> httpx.Response:
        answer = tenant.post(RESPONSES, body)
        if answer.status_code == 200:
            kept.append(answer.json()["id"])
        return answer

    statuses = tenant.at_once(200, begin, threads=20)
    for response_id in kept:
        tenant.post(f"{RESPONSES}/{response_id}/cancel", b"")
        tenant.delete(f"{RESPONSES}/{response_id}")
    return statuses


def blanks(tenant: Tenant) -> Statuses:
    """Eight bodies of white space before a chat."""
    body = {"model": tenant.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    padded = b" " * BLANK_BYTES + json.dumps(body).encode()
    return tenant.at_once(8, lambda i: tenant.post(CHAT, padded))


def logit_bias(tenant: Tenant) -> Statuses:
    """Sixteen chats with the most biased tokens that one may have."""
    return tenant.at_once(16, lambda i: tenant.chat(logit_bias={str(token): 100 for token in range(1024)}))


def schemas(tenant: Tenant) -> Statuses:
    """Sixteen schemas of 2,000 properties each that nobody has sent before."""

    def ask(_: int) -> httpx.Response:
        properties = {f"p{random.random()}": {"type": "string", "maxLength": 1000} for _ in range(2000)}
        schema = {"name": "x", "schema": {"type": "object", "properties": properties}}
        return tenant.chat(max_tokens=8, response_format={"type": "json_schema", "json_schema": schema})

    return tenant.at_once(16, ask)


LOADS: dict[str, Callable[[Tenant], Statuses]] = {
    "batch": batch,
    "prompt_logprobs": prompt_logprobs,
    "background": background,
    "blanks": blanks,
    "logit_bias": logit_bias,
    "schemas": schemas,
}
