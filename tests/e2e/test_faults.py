"""A worker is killed under load: /health turns, the replica comes back without help, and the streams go on there."""

from __future__ import annotations

import contextlib
import threading
import time

import httpx
import openai
import psutil
import pytest

from benchmarks.serve_process import ServeProcess
from tests.e2e.conftest import Record, metric, wait_until
from tests.limits import patience_s

pytestmark = [pytest.mark.timeout(300)]


def _workers(server: ServeProcess) -> list[psutil.Process]:
    return server.find("ray::Worker") + server.find("ray::_WorkerActor") + server.find("ray::WorkerActor")


def running(server: ServeProcess) -> float:
    return metric(httpx.get(f"{server.base_url}/metrics", timeout=patience_s()).text, "vllm:num_requests_running")


def test_kill_9_of_a_worker(quickstart: ServeProcess, record: Record) -> None:
    client = openai.OpenAI(base_url=f"{quickstart.base_url}/v1", api_key="none", max_retries=0, timeout=patience_s())
    outcomes: list[str] = []

    def text() -> str:
        sampled = {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3, "extra_body": {"ignore_eos": True}}
        chunks = client.completions.create(model="tiny-chat", prompt="count", max_tokens=600, stream=True, **sampled)
        return "".join(chunk.choices[0].text for chunk in chunks)

    whole = text()

    def stream() -> None:
        try:
            outcomes.append(text())
        except openai.APIError as error:
            outcomes.append(f"error: {error.message}")

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: running(quickstart) == 4, 30, "all run")
    workers = _workers(quickstart)
    assert workers, "no worker process found"
    killed_at = time.monotonic()
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # a process of Ray's that only looked like one
            worker.kill()
    turned = wait_until(lambda: quickstart.health() != 200, 10, "/health turned")
    for thread in threads:
        thread.join(patience_s())
    assert len(outcomes) == 4, "a request hangs"
    assert outcomes == [whole] * 4
    wait_until(lambda: quickstart.health() == 200, 60, "the replica is back")
    back = time.monotonic() - killed_at
    assert client.completions.create(model="tiny-chat", prompt="hello", max_tokens=4).usage.completion_tokens <= 4
    assert httpx.get(f"{quickstart.base_url}/health").status_code == 200
    record("worker_killed_health_turned_s", round(turned, 2))
    record("worker_killed_replica_back_s", round(back, 2))
