"""The operator's listener over two real replicas, while streams run: no wrong token, no error, no mixture."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.checkpoints.model_info import resolve_model
from app.offline.llm import LLM
from app.records.sampling_params import SamplingParams
from benchmarks.serve_process import ROOT, ServeProcess, free_port
from tests import limits
from tests.limits import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "operator-key-0123456789"
NUM_TOKENS = 48
PROMPTS = [[3 + number, *range(40, 60 + 5 * number), 7] for number in range(12)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model, and the same with other weights."""
    old, new = resolve_model("tiny-chat"), tmp_path_factory.mktemp("new") / "model"
    shutil.copytree(old, new)
    torch.manual_seed(7)
    tensors = {
        name: one + 0.1 * one.std() * torch.randn_like(one)
        for name, one in load_file(old / "model.safetensors").items()
    }
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    return old, new


@pytest.fixture(scope="module")
def answers(directories: tuple[Path, Path]) -> list[dict[int, list[int]]]:
    """What each set of weights says to each prompt, by engines without a server."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    found = []
    for path in directories:
        with LLM(str(path), num_blocks=256, dtype="float32") as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params)
            found.append({i: list(output.outputs[0].token_ids) for i, output in enumerate(outputs)})
    return found


class Operator:
    """Calls of the admin listener."""

    def __init__(self, port: int) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=limits.patience_s())

    def post(self, path: str, body: Any = None) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self._http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/models")["models"][0]["replicas"]
        return found


class Load:
    """Streams that come one after another, several at a time, until they are stopped."""

    def __init__(self, base_url: str) -> None:
        self.client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0, timeout=limits.patience_s())
        self.told: list[tuple[int, list[int]]] = []
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(6)
        self._work: list[Any] = []

    def __enter__(self) -> Load:
        self._stop.clear()
        self._work = [self._pool.submit(self._run, number) for number in range(6)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for one in self._work:
            one.result(limits.patience_s())

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            number = (number + 5) % len(PROMPTS)
            self.told.append((number, self.ask(number)))

    def ask(self, number: int) -> list[int]:
        chunks = self.client.completions.create(
            model="tiny-chat", prompt=PROMPTS[number], max_tokens=NUM_TOKENS, temperature=0.0, stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]

    def more(self, count: int) -> None:
        """Return when so many more answers have come."""
        wanted = len(self.told) + count
        wait_until(lambda: len(self.told) >= wanted or any(one.done() for one in self._work), "answers come")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServeProcess, Operator]]:
    port, file = free_port(), tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"operator={KEY}\n")

    def edit(config: dict[str, Any]) -> None:
        model = config["applications"][0]["args"]["models"][0]
        model |= {"num_replicas": 2, "cpus_per_worker": 0.1, "replica_cpus": 0.1}
        model["engine"] |= {"model": "tiny-chat", "dtype": "float32", "kv_cache_memory_bytes": 1 << 26}
        config["applications"][0]["args"]["admin"] = {"port": port, "keys_file": str(file)}

    with ServeProcess(ROOT / "configs/serve/quickstart.yaml", edit, ends_gracefully=False) as server:
        operator = Operator(port)
        wait_until(lambda: [one["condition"] for one in operator.replicas()] == ["serving"] * 2, "both have joined")
        yield server, operator


def test_pause_reset_and_weights_under_load(
    served: tuple[ServeProcess, Operator], directories: tuple[Path, Path], answers: list[dict[int, list[int]]]
) -> None:
    server, operator = served
    old, new = answers
    assert old != new
    load = Load(server.base_url)
    with load:
        load.more(6)
        operator.post("/reset_prefix_cache")
        for mode in ("keep", "wait"):
            operator.post(f"/pause?mode={mode}&clear_cache=false")
            assert operator.get("/is_paused") == {"is_paused": True}
            ready = httpx.get(f"{server.base_url}/ready", timeout=limits.patience_s())
            assert (ready.status_code, "retry-after" in ready.headers) == (503, True)
            assert "wait: an operator has paused the engine" in ready.json()["error"]["message"]
            operator.post("/resume")
        load.more(6)
        num_before = len(load.told)
        results = operator.post("/update_weights", {"path": str(directories[1])})["results"]
        num_after = len(load.told)
        assert len({one["result"] for one in results}) == 1
        load.more(12)
    for i, (number, tokens) in enumerate(load.told):
        expected = (
            [old[number]] if i < num_before else [new[number]] if i > num_after + 6 else [old[number], new[number]]
        )
        assert tokens in expected, f"answer {i} of {len(load.told)}"
    assert {one["model_revision"] for one in operator.replicas()} == {results[0]["result"]}
    operator.post("/reload_weights", {})
    assert load.ask(3) == old[3]


def sleep_states(server: ServeProcess) -> set[str]:
    lines = httpx.get(f"{server.base_url}/metrics", timeout=limits.patience_s()).text.splitlines()
    found = [line for line in lines if line.startswith("vllm:engine_sleep_state") and line.endswith(" 1.0")]
    assert len(found) == 2
    return {line.split('sleep_state="')[1].split('"')[0] for line in found}


def test_sleep_and_a_replica_that_starts_meanwhile(
    served: tuple[ServeProcess, Operator], directories: tuple[Path, Path], answers: list[dict[int, list[int]]]
) -> None:
    server, operator = served
    load = Load(server.base_url)
    operator.post("/update_weights", {"path": str(directories[1])})
    operator.post("/sleep?level=1")
    assert operator.get("/is_sleeping") == {"is_sleeping": True}
    assert sleep_states(server) == {"weights_offloaded"}
    with pytest.raises(openai.InternalServerError):
        load.ask(0)
    before = {one["replica_id"] for one in operator.replicas()}
    engines = [one for one in server.processes() if "Engine" in one.name() or "Engine-tiny" in " ".join(one.cmdline())]
    assert engines, "the replicas' processes are found by name"
    engines[0].send_signal(9)

    def has_joined() -> bool:
        found = operator.replicas()
        return len(found) == 2 and {one["replica_id"] for one in found} != before and all(
            one["condition"] == "serving" for one in found
        )  # fmt: skip

    wait_until(has_joined, "another one is there")
    assert {one["sleep_level"] for one in operator.replicas()} == {1}
    operator.post("/wake_up")
    assert sleep_states(server) == {"awake"}
    assert [load.ask(number) for number in range(4)] == [answers[1][number] for number in range(4)]
    assert {one["model_revision"] for one in operator.replicas()} != set()


def test_a_replica_is_drained_and_an_admin_dies(served: tuple[ServeProcess, Operator]) -> None:
    server, operator = served
    first, second = sorted(one["replica_id"] for one in operator.replicas())
    with Load(server.base_url) as load:
        load.more(3)
        operator.post(f"/replicas/{first}/drain?move=true")
        load.more(6)
        admin = [one for one in server.processes() if "Admin" in " ".join(one.cmdline())]
        assert admin
        admin[0].kill()
        psutil.wait_procs(admin[:1])
        load.more(6)

    def answers() -> bool:
        try:
            return bool(operator.get("/models"))
        except httpx.HTTPError:
            return False

    wait_until(answers, "Serve has started another Admin")
    conditions = {one["replica_id"]: one["condition"] for one in operator.replicas()}
    assert conditions == {first: "drained", second: "serving"}
    operator.post(f"/replicas/{first}/resume")
    assert {one["condition"] for one in operator.replicas()} == {"serving"}
    assert operator.get("/models")["models"][0]["fleet"]["weights"] is not None
