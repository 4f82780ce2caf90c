"""A rank of a two-worker replica is killed or stopped under load, again and again, over both transports: noticed in
time, nothing left over, a new worker group serves without help, and the streams go on there."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import psutil
import pytest

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.e2e.conftest import Record, wait_until
from tests.engine.executor.semaphores import graph_semaphores, left_semaphores
from tests.limits import patience_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 20
STEP_TIMEOUT_S = 3.0
ASKED_S = 1.0  # so long a stopped rank is asked what it is doing
LOADED_S = 2.0  # allowance for hangs: two cores also run the server, the other streams and this test
HANGS_S = 120.0  # a request that has not ended by then never will
NOTICED_S = {
    "socket": {"SIGKILL": 1.0, "SIGSTOP": STEP_TIMEOUT_S + ASKED_S + LOADED_S},
    "compiled_graph": {"SIGKILL": 3.0, "SIGSTOP": STEP_TIMEOUT_S + ASKED_S + LOADED_S},
}


def edit_to(transport: str) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        (model,) = config["applications"][0]["args"]["models"]
        model["engine"].update(step_timeout_s=limits.scaled_s(STEP_TIMEOUT_S), step_transport=transport)

    return edit


def workers(server: ServeProcess) -> list[psutil.Process]:
    return sorted(server.find("ray::WorkerActor") + server.find("ray::Worker."), key=lambda process: process.pid)


def shared_memory() -> int:
    return len(os.listdir("/dev/shm"))


class Load:
    """Streams that last longer than anything that is done to the server."""

    def __init__(self, server: ServeProcess, count: int) -> None:
        self._client = openai.OpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=patience_s()
        )
        self.outcomes: list[str] = []
        self.tokens = 0
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _stream(self) -> None:
        options: dict[str, Any] = {"max_tokens": 1800, "extra_body": {"ignore_eos": True}, "stream": True}
        try:
            for _ in self._client.completions.create(model="tiny-chat", prompt="count", **options):
                self.tokens += 1
            self.outcomes.append("finished")
        except openai.APIError as error:
            self.outcomes.append(f"error: {error.message}")

    def until_all_ended(self, timeout_s: float) -> None:
        begun = time.monotonic()
        for thread in self._threads:
            thread.join(max(0.0, timeout_s - (time.monotonic() - begun)))
        assert not any(thread.is_alive() for thread in self._threads), "a request hangs"


@pytest.mark.parametrize("transport", sorted(NOTICED_S))
def test_kill_and_stop_of_each_rank(record: Record, transport: str) -> None:
    rng = random.Random(0)
    noticed: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    back: list[float] = []
    segments: list[int] = []
    semaphores = graph_semaphores()
    with ServeProcess(ROOT / "configs/serve/tp2-cpu.yaml", edit_to(transport)) as server:
        for number in range(ROUNDS):
            wait_until(lambda: len(workers(server)) == 2, 60, "two workers")
            load = Load(server, 4)
            wait_until(lambda load=load: load.tokens > 20, 30, "tokens flow")  # type: ignore[misc]
            limits.pause(rng.random())
            worker_group = workers(server)
            pids = {process.pid for process in worker_group}
            name = ("SIGKILL", "SIGSTOP")[number // 2 % 2]
            os.kill(worker_group[number % 2].pid, getattr(signal, name))
            begun = time.monotonic()
            wait_until(lambda: server.health() != 200, 30, "/health turned")
            noticed[name].append(time.monotonic() - begun)
            begun = time.monotonic()
            wait_until(lambda pids=pids: not pids & set(psutil.pids()), 10, "no orphan")  # type: ignore[misc]
            wait_until(lambda: server.health() == 200, 90, "the replica is back")
            back.append(time.monotonic() - begun)
            load.until_all_ended(HANGS_S)
            assert load.outcomes == ["finished"] * 4
            assert not left_semaphores(semaphores)
            segments.append(shared_memory())
    assert max(segments[1:]) <= segments[0] + 1, f"shared memory leaks: {segments}"
    for name, seconds in noticed.items():
        record(f"worker_group_{transport}_{name.lower()}_noticed_s_max", round(max(seconds), 2))
    record(f"worker_group_{transport}_back_s_max", round(max(back), 2))
    record(f"worker_group_{transport}_shared_memory_files", segments)
    for name, seconds in noticed.items():
        assert max(seconds) < NOTICED_S[transport][name], f"{name}: {seconds}"
