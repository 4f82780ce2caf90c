"""Replicas that come and go by the load: whoever asks waits for the first one, and no stream notices that its replica
goes. The short form runs over an engine without a model, the long one (`make acceptance`) over the built-in one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests.e2e.conftest import Record, metric, wait_until
from tests.limits import patience_s, scaled_s

pytestmark = pytest.mark.timeout(1200)

CONFIG = ROOT / "configs/serve/autoscaling.yaml"
NUM_AT_ONCE = 10  # more than one replica runs at a time
NUM_TOKENS = 400


def edit(config: dict[str, Any]) -> None:
    """Smaller replicas, less patience; and objectives that this machine's speed does not matter for."""
    (model,) = config["applications"][0]["args"]["models"]
    model["engine"]["max_num_seqs"] = NUM_AT_ONCE - 2
    model["slo"] = {"ttft_s": 600, "itl_s": 600}
    model["autoscaling"] |= {"idle_s": scaled_s(5), "down_interval_s": scaled_s(5), "down_delay_s": 0, "up_delay_s": 1}
    model["autoscaling"]["wake_wait_s"] = patience_s(300)


def edit_short(config: dict[str, Any]) -> None:
    """The same over the fake engine."""
    edit(config)
    (application,) = config["applications"]
    application["import_path"] = "tests.deployments.fake_app:build"
    application["args"]["models"][0] |= {"cpus_per_worker": 0.01, "replica_cpus": 0.01}


def num_replicas(server: ServeProcess) -> int:
    text = httpx.get(f"{server.base_url}/metrics", timeout=patience_s()).text
    return round(metric(text, "manta:ingress_channels"))


def connect(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=patience_s(300))


def answer(client: openai.OpenAI, number: int) -> str:
    """The whole text of a stream; it fails if the stream does, and shows in the text if anything is missing."""
    chunks = client.completions.create(
        model="tiny-chat", prompt=f"Count from {number}: ", max_tokens=NUM_TOKENS, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    text, reasons, tokens = "", [], 0
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    assert (reasons, tokens) == (["length"], NUM_TOKENS)
    return text


def all_at_once(server: ServeProcess) -> list[str]:
    """The answers of requests that find no replica, and for which one is too few."""
    assert num_replicas(server) == 0
    assert httpx.get(f"{server.base_url}/health", timeout=patience_s()).status_code == 200, "it sleeps, and is well"
    client = connect(server)
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return list(pool.map(lambda number: answer(client, number), range(NUM_AT_ONCE)))


def test_a_sleeping_model_wakes_for_who_waits() -> None:
    with ServeProcess(CONFIG, edit_short, ready_timeout_s=patience_s(120), ends_gracefully=False) as server:
        assert all(all_at_once(server))
        wait_until(lambda: num_replicas(server) == 2, 60, "both replicas are there")


@pytest.mark.slow
def test_from_nothing_to_two_to_one_under_streams_to_nothing(record: Record) -> None:
    with ServeProcess(CONFIG, edit, ready_timeout_s=patience_s(120)) as server:
        first = all_at_once(server)
        record("autoscaling_woken_by", f"{len(first)} requests, all answered")
        wait_until(lambda: num_replicas(server) == 2, 60, "both replicas are there")
        num = _streams_while(server, first, lambda: num_replicas(server) == 1)
        record("autoscaling_streams_over_two_to_one", f"{num}, all whole")
        wait_until(lambda: num_replicas(server) == 0, 180, "the last one goes for want of requests")
        assert answer(connect(server), 3) == first[3]


def _streams_while(server: ServeProcess, first: list[str], until: Callable[[], bool]) -> int:
    """Stream after stream in three places, each as it was at `first`, until then; how many there were."""
    client, done = connect(server), threading.Event()

    def stream(numbers: Iterator[int]) -> int:
        num = 0
        while not done.is_set():
            number = next(numbers)
            assert answer(client, number) == first[number]
            num += 1
        return num

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream, itertools.cycle(range(i, NUM_AT_ONCE, 3))) for i in range(3)]
        try:
            wait_until(until, 180, "one replica goes while streams run")
        finally:
            done.set()
        return sum(each.result() for each in streams)
