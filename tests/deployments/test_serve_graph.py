"""The real graph on a real Ray Serve cluster, over HTTP, with an engine that needs no model.

One cluster for the module: two replicas of `fast`, one of `single`. The tests that kill something come last, and each
waits until the graph is whole again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.checkpoints.model_info import resolve_model
from app.text.tokenizer import Tokenizer
from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.deployments.fake_engine import ERROR_SEED, FATAL_SEED, HOLD_SEED, REFUSED_SEED
from tests.limits import wait_until

pytestmark = pytest.mark.timeout(300)

PROMPT = list(range(300, 340))
HOLD = Path(tempfile.mkdtemp(prefix="mnt")) / "hold"  # while it is there, requests of HOLD_SEED get no token


def edit(config: dict[str, Any]) -> None:
    """The quickstart's file, over the fake engine."""
    application = config["applications"][0]
    application["import_path"] = "tests.deployments.fake_app:build"
    application["runtime_env"]["env_vars"]["MANTA_FAKE_HOLD"] = str(HOLD)
    shared = {"cpus_per_worker": 0.01, "replica_cpus": 0.01, "health_check_period_s": limits.scaled_s(1.0)}
    shared["graceful_shutdown_timeout_s"] = limits.patience_s()
    application["args"] = {
        "models": [
            {"name": "fast", "aliases": ["quick"], "num_replicas": 2, **shared},
            {"name": "single", **shared},
        ],
        "ingress": {
            "num_replicas": 1,  # on GPUs, too
            "credit_window_tokens": 64,
            "lease_s": limits.scaled_s(4.0),
            "admin": True,
            "route_timeout_s": limits.scaled_s(1.5),  # a late Router is none, and its prompts go anywhere
            "limits": {"max_waiting_requests": 90},
        },
    }


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with ServeProcess(
        ROOT / "configs/serve/quickstart.yaml", edit, ready_timeout_s=limits.patience_s(), ends_gracefully=False
    ) as process:
        wait_until(lambda: num_channels(process) == 3, "all replicas are found")
        assert num_connected(process), "no channel has a connection of its own"
        yield process
    shutil.rmtree(HOLD.parent)


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=limits.patience_s())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(resolve_model("tiny-chat"))


def metrics(server: ServeProcess) -> list[Any]:
    """Families of /metrics."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=limits.patience_s()).text
    return list(text_string_to_metric_families(text))


def samples(server: ServeProcess, name: str) -> dict[tuple[str, str], float]:
    """Value by (model_name, engine), summed over other labels."""
    found: dict[tuple[str, str], float] = {}
    for family in metrics(server):
        for sample in family.samples:
            if sample.name == name:
                key = (sample.labels.get("model_name", ""), sample.labels.get("engine", ""))
                found[key] = found.get(key, 0.0) + sample.value
    return found


def num_whole(server: ServeProcess) -> float:
    """Requests that ended by themselves: nobody aborted them, or too late."""
    families = metrics(server)
    found = [s for f in families for s in f.samples if s.name == "vllm:request_success_total"]
    return sum(sample.value for sample in found if sample.labels["finished_reason"] == "length")


def num_running(server: ServeProcess) -> float:
    return sum(samples(server, "vllm:num_requests_running").values())


def both_run(server: ServeProcess) -> bool:
    """Whether each replica of `fast` has requests."""
    running = samples(server, "vllm:num_requests_running")
    return min(running.get(("fast", str(i)), 0.0) for i in range(2)) > 0


def num_channels(server: ServeProcess) -> float:
    """Engine replicas that the ingress can use."""
    return sum(samples(server, "manta:ingress_channels").values())


def num_connected(server: ServeProcess) -> float:
    """Those of them that it has a connection of its own to."""
    return sum(samples(server, "manta:ingress_direct_channels").values())


def replicas(server: ServeProcess, deployment: str) -> list[psutil.Process]:
    return server.find(f"ServeReplica:manta:{deployment}")


def explain(server: ServeProcess, prompt: str) -> dict[str, int]:
    """Cached tokens of a prompt by replica of `fast`, as the Router knows them; empty while it does not answer."""
    answer = httpx.post(
        f"{server.base_url}/debug/route", json={"model": "fast", "prompt": prompt}, timeout=limits.patience_s()
    )
    if answer.status_code != 200:
        return {}
    return {replica["replica_id"]: replica["cached_tokens"] for replica in answer.json()["replicas"]}


def until_both_serve(server: ServeProcess) -> None:
    """Both replicas of `fast` are found by the ingress and chosen by the Router."""
    wait_until(lambda: num_channels(server) == 3, "three replicas again")

    numbers = itertools.count(400)

    def ask(_: int) -> str:
        # A prompt of its own: one that is cached would draw all to one replica as long as they come one by one.
        body = {"model": "fast", "prompt": [next(numbers)] * 40, "max_tokens": 50}
        answer = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=limits.patience_s())
        return answer.headers.get("x-manta-replica", "")

    def both_answer() -> bool:
        with ThreadPoolExecutor(4) as pool:
            return len(set(pool.map(ask, range(4))) - {""}) == 2

    wait_until(both_answer, "the Router uses both replicas")


def stream(server: ServeProcess, **body: Any) -> Iterator[str]:
    """Payloads of a streamed completion, `[DONE]` included."""
    body = {"model": "fast", "prompt": PROMPT, "temperature": 0, "stream": True, **body}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=limits.patience_s()) as answer:
        if answer.status_code != 200:
            answer.read()
            raise AssertionError(answer.text)
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line[6:]


def text_of(chunks: list[str]) -> str:
    """What a stream said, which must have come to its end."""
    assert chunks[-1] == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


def migrations(server: ServeProcess, reason: str = "") -> float:
    """Requests that went on at another replica, of all or of one reason."""
    name = "manta:ingress_migrations_total"
    found = [s for f in metrics(server) for s in f.samples if s.name == name]
    return sum(sample.value for sample in found if reason in sample.labels["reason"])


def open_stream(server: ServeProcess, **body: Any) -> socket.socket:
    """A streamed completion on a bare socket with a small receive buffer."""
    raw = json.dumps({"model": "fast", "prompt": PROMPT, "temperature": 0, "stream": True, **body}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    )
    sock.sendall(head.encode() + b"\r\n" + raw)
    return sock


def expected(tokenizer: Tokenizer, prompt: list[int], count: int) -> str:
    return tokenizer.decode([prompt[i % len(prompt)] for i in range(count)])


def test_streamed_equals_whole(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    for count in (1, 2, 50):
        whole = client.completions.create(model="fast", prompt=PROMPT, max_tokens=count)
        parts = client.completions.create(model="fast", prompt=PROMPT, max_tokens=count, stream=True)
        text = "".join(part.choices[0].text for part in parts)
        assert whole.choices[0].text == text == expected(tokenizer, PROMPT, count)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == count


def test_chat_and_alias(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quick", messages=[{"role": "user", "content": "hello"}], max_tokens=8, n=2
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]


def test_choices_of_a_prompt_stay_together(server: ServeProcess, client: openai.OpenAI) -> None:
    before = samples(server, "vllm:request_success_total")
    answer = client.completions.create(model="fast", prompt=PROMPT, max_tokens=4, n=8)
    assert len(answer.choices) == 8
    after = samples(server, "vllm:request_success_total")
    gained = [after.get(key, 0) - before.get(key, 0) for key in (("fast", "0"), ("fast", "1"))]
    assert sorted(gained) == [0, 8]


def test_concurrent_streams_are_not_mixed_up(server: ServeProcess, client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    used: set[str] = set()

    def ask(i: int) -> None:
        prompt = [300 + (7 * i + j) % 500 for j in range(20 + i % 7)]
        raw = client.completions.with_raw_response.create(model="fast", prompt=prompt, max_tokens=100, temperature=0)
        used.add(raw.headers["x-manta-replica"])
        assert raw.parse().choices[0].text == expected(tokenizer, prompt, 100)

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(ask, range(64)))
    assert len(used) == 2  # the Router spreads them


def test_models(client: openai.OpenAI) -> None:
    assert {"fast", "single"} <= {model.id for model in client.models.list()}
    assert client.completions.create(model="single", prompt=PROMPT, max_tokens=3).choices[0].text
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.completions.create(model="nobody", prompt=PROMPT)


def test_a_kept_response_is_continued(client: openai.OpenAI) -> None:
    """The ingress asks the store's actor, which is made for the first response."""
    first = client.responses.create(model="fast", input="hi", max_output_tokens=5)
    second = client.responses.create(model="fast", input="so?", max_output_tokens=5, previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    with pytest.raises(openai.BadRequestError, match="not kept"):
        client.responses.create(model="fast", input="so?", previous_response_id="resp_none")


def test_a_conversation_over_a_websocket(server: ServeProcess, client: openai.OpenAI) -> None:
    """Through HAProxy and Serve; a client that leaves takes its answer with it."""
    ends = ("response.completed", "response.incomplete", "response.failed", "error")
    wait_until(lambda: num_running(server) == 0, "quiet")
    with client.responses.connect() as connection:

        def answer(**fields: Any) -> Any:
            connection.response.create(model="fast", max_output_tokens=5, store=False, **fields)
            return next(event for event in connection if event.type in ends).response

        first = answer(input="hi")
        second = answer(input="so?", previous_response_id=first.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        assert sum(samples(server, "manta:ingress_sockets").values()) == 1
        connection.response.create(model="fast", input="hi", max_output_tokens=1900)
        assert next(iter(connection)).type == "response.created"
        wait_until(lambda: num_running(server) == 1, "the answer")
    wait_until(lambda: num_running(server) == 0, "aborted")
    with pytest.raises(openai.BadRequestError, match="not kept"):
        client.responses.create(model="fast", input="so?", previous_response_id=second.id)


def test_a_background_response_and_a_batch(client: openai.OpenAI) -> None:
    """Both go on in the ingress without the client, and are kept by the store's actor."""
    response = client.responses.create(model="fast", input="hi", max_output_tokens=5, background=True)
    assert response.status == "queued"
    wait_until(lambda: client.responses.retrieve(response.id).status == "incomplete", "the background response")
    events = list(client.responses.retrieve(response.id, stream=True, starting_after=2))
    assert [event.sequence_number for event in events] == list(range(3, 3 + len(events)))
    body = {"model": "fast", "prompt": PROMPT, "max_tokens": 5}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(8)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")
    output_file_id = client.batches.retrieve(batch.id).output_file_id
    assert output_file_id is not None
    results = [json.loads(line) for line in client.files.content(output_file_id).text.splitlines()]
    assert sorted(result["custom_id"] for result in results) == [str(i) for i in range(8)]
    assert {result["response"]["body"]["usage"]["completion_tokens"] for result in results} == {5}
    assert all(result["response"]["request_id"] for result in results)


def test_refusal_of_the_engine_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fast", prompt=PROMPT, seed=REFUSED_SEED)
    assert refused.value.param == "seed"


def test_full_ingress_says_so(server: ServeProcess, client: openai.OpenAI) -> None:
    whole = num_whole(server)
    first = open_stream(server, n=60, max_tokens=1900)
    wait_until(lambda: num_running(server) == 60, "the first 60 run")
    with pytest.raises(openai.RateLimitError, match="requests are in flight"):
        client.completions.create(model="fast", prompt=PROMPT, n=60, max_tokens=50)
    first.close()
    wait_until(lambda: num_running(server) == 0, "the accepted choices are aborted")
    assert num_whole(server) == whole
    assert sum(samples(server, "manta:ingress_rejections_total").values()) >= 10
    assert sum(samples(server, "manta:ingress_requests").values()) == 0


def test_request_fails_alone(server: ServeProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(lambda: list(stream(server, model="single", max_tokens=100)))
        bad = list(stream(server, model="single", max_tokens=100, seed=ERROR_SEED))
    assert "this request has failed" in json.loads(bad[-2])["error"]["message"]
    assert bad[-1] == "[DONE]"
    assert json.loads(good.result()[-2])["choices"][0]["finish_reason"] == "length"
    assert server.health() == 200


def test_metrics_count_all_replicas(server: ServeProcess, client: openai.OpenAI) -> None:
    before = samples(server, "vllm:request_success_total")
    tokens = samples(server, "vllm:generation_tokens_total")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: client.completions.create(model="fast", prompt=PROMPT, max_tokens=10), range(24)))
    after = samples(server, "vllm:request_success_total")
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    assert gained[("fast", "0")] + gained[("fast", "1")] == 24
    assert min(gained[("fast", "0")], gained[("fast", "1")]) >= 4
    assert gained.get(("single", "0"), 0) == 0
    more = samples(server, "vllm:generation_tokens_total")
    counts = samples(server, "vllm:e2e_request_latency_seconds_count")
    # Of this model: the canary may have asked the other one meanwhile.
    assert sum(more[key] - tokens.get(key, 0) for key in more if key[0] == "fast") == 240
    assert {key: count for key, count in counts.items() if key[0] == "fast"} == {
        key: count for key, count in after.items() if key[0] == "fast"
    }


def test_ready_and_a_page_for_each_replica(server: ServeProcess) -> None:
    """What a balancer and Prometheus ask: /live, /ready, and targets whose pages hold that replica's series alone."""
    assert list(stream(server, max_tokens=3))[-1] == "[DONE]"  # something to count
    assert httpx.get(f"{server.base_url}/live").status_code == 200
    ready = httpx.get(f"{server.base_url}/ready")
    assert ready.status_code == 200, ready.text
    targets = httpx.get(f"{server.base_url}/metrics/targets", timeout=limits.patience_s()).json()
    names = [target["labels"]["instance"] for target in targets]
    assert {name for name in names if name.startswith("engine:")} == {
        "engine:fast:0",
        "engine:fast:1",
        "engine:single:0",
    }
    assert sorted(name.partition(":")[0] for name in names if not name.startswith("engine:")) == ["ingress", "router"]
    for target, name in zip(targets, names, strict=True):
        url = f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}"
        families = text_string_to_metric_families(httpx.get(url, timeout=limits.patience_s()).text)
        series = [sample.labels for family in families for sample in family.samples]
        assert series
        own = {":".join(("engine", one["model_name"], one["engine"])) for one in series if "engine" in one}
        assert own == ({name} if name.startswith("engine:") else set())
    counted = [s for f in metrics(server) for s in f.samples if s.name == "http_requests_total"]
    assert any(sample.labels["handler"] == "/v1/completions" for sample in counted)


def test_one_request_id(server: ServeProcess) -> None:
    """Serve's middleware adds the header; ours is not to add it again."""
    headers = httpx.get(
        f"{server.base_url}/v1/models", headers={"x-request-id": "abc-1"}, timeout=limits.patience_s()
    ).headers
    assert headers.get_list("x-request-id") == headers.get_list("request-id") == ["abc-1"]
    headers = httpx.get(f"{server.base_url}/v1/models", timeout=limits.patience_s()).headers
    assert len(headers.get_list("x-request-id")) == 1
    assert headers["x-request-id"] == headers["request-id"]


def test_disconnect_aborts_soon(server: ServeProcess) -> None:
    wait_until(lambda: num_running(server) == 0, "quiet")
    whole = num_whole(server)
    chunks = stream(server, max_tokens=1900)
    for _ in range(5):
        next(chunks)
    assert num_running(server) == 1
    chunks.close()  # type: ignore[attr-defined]
    wait_until(lambda: num_running(server) == 0, "aborted")
    assert num_whole(server) == whole


def test_random_disconnects_leak_nothing(server: ServeProcess) -> None:
    def cut(i: int) -> None:
        sock = open_stream(server, max_tokens=1900)
        limits.pause((i * 37 % 100) / 400)
        sock.close()

    whole = num_whole(server)
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(cut, range(60)))
    wait_until(lambda: num_running(server) == 0, "all aborted")
    assert num_whole(server) == whole
    assert server.health() == 200


def test_slow_client_does_not_hold_others(server: ServeProcess) -> None:
    slow = open_stream(server, model="single", max_tokens=1900, logprobs=20, n=16)
    wait_until(lambda: sum(samples(server, "manta:num_requests_paused").values()) > 0, "the slow request is paused")
    assert len(list(stream(server, model="single", max_tokens=200))) >= 200
    assert sum(samples(server, "manta:num_requests_paused").values()) > 0
    slow.close()
    wait_until(lambda: num_running(server) == 0, "aborted")


def test_a_reader_that_pauses_gets_everything(server: ServeProcess) -> None:
    chunks = stream(server, max_tokens=600)
    got = [next(chunks)]
    limits.pause(1.5)
    got += list(chunks)
    assert got[-1] == "[DONE]"
    assert json.loads(got[-2])["choices"][0]["finish_reason"] == "length"
    assert len([chunk for chunk in got[:-1] if json.loads(chunk)["choices"][0]["text"]]) >= 500


def test_a_prompt_goes_where_it_is_cached(server: ServeProcess, client: openai.OpenAI) -> None:
    """The Router hears of the blocks, says so, and sends equal prompts there; the usage tells of it."""
    # Another one each time, from its first block on: repeated, the test would find what it left in both replicas.
    prompt = f"{secrets.token_hex(8)} was a cache that nobody knew. " * 8
    raw = client.completions.with_raw_response.create(model="fast", prompt=prompt, max_tokens=2)
    home, usage = raw.headers["x-manta-replica"], raw.parse().usage
    assert usage is not None
    cached = (usage.prompt_tokens - 1) // 16 * 16
    assert cached > 0
    wait_until(lambda: explain(server, prompt).get(home) == cached, "the Router knows")
    assert sorted(explain(server, prompt).values()) == [0, cached]
    before = levels(server)
    for _ in range(4):
        options = {"include_usage": True}
        raw = client.completions.with_raw_response.create(
            model="fast", prompt=prompt, max_tokens=2, stream=True, stream_options=options
        )
        assert raw.headers["x-manta-replica"] == home
        *_, last = raw.parse()
        assert last.usage.prompt_tokens_details.cached_tokens >= cached
    assert levels(server).get("exact", 0) - before.get("exact", 0) == 4


def levels(server: ServeProcess) -> dict[str, float]:
    """Prompts placed, by what the choice was informed by."""
    return {
        s.labels["level"]: s.value for f in metrics(server) for s in f.samples if s.name == "manta:ingress_routes_total"
    }


def test_dead_router_costs_no_request(server: ServeProcess, client: openai.OpenAI) -> None:
    (router,) = replicas(server, "Router")
    prompt = "What outlives a Router is what the engines remember. " * 8
    client.completions.create(model="fast", prompt=prompt, max_tokens=2)
    placed = levels(server).get("ingress", 0)
    router.suspend()  # it hangs first: one that is only killed may be back before the limit
    with ThreadPoolExecutor(8) as pool, limits.soon(30.0, "answers without a Router"):
        answers = list(
            pool.map(lambda i: client.completions.create(model="fast", prompt=PROMPT, max_tokens=5), range(24))
        )
    assert all(answer.choices[0].finish_reason == "length" for answer in answers)
    assert levels(server)["ingress"] - placed == 24
    router.kill()
    assert server.health() == 200
    wait_until(lambda: [p.pid for p in replicas(server, "Router")] not in ([], [router.pid]), "a new Router")
    wait_until(lambda: any(explain(server, prompt).values()), "the new Router knows the caches")


def test_dead_engine_is_told_and_replaced(server: ServeProcess) -> None:
    """The engine reports a fatal error: /health turns, the replica comes back, and what it ran goes on there."""
    (old,) = replicas(server, "Engine-single")
    whole = text_of(list(stream(server, model="single", max_tokens=100)))
    with ThreadPoolExecutor(2) as pool:
        killer = pool.submit(lambda: list(stream(server, model="single", max_tokens=100, seed=FATAL_SEED)))
        wait_until(lambda: server.health() == 503, "/health turned")
        with pytest.raises(AssertionError, match="engine_unavailable"):
            next(stream(server, model="single"))
        assert next(stream(server, model="fast", max_tokens=3))  # the other model does not care
        assert text_of(killer.result(limits.patience_s())) == whole
    wait_until(lambda: server.health() == 200, "the replica is back")
    assert [p.pid for p in replicas(server, "Engine-single")] != [old.pid]
    assert list(stream(server, model="single", max_tokens=3))[-1] == "[DONE]"


def test_hung_replica_is_not_ready(server: ServeProcess) -> None:
    """SIGSTOP: /health turns although the process lives, and turns back when it goes on."""
    (engine,) = replicas(server, "Engine-single")
    engine.suspend()
    try:
        wait_until(lambda: server.health() == 503, "/health turned")
        assert list(stream(server, model="fast", max_tokens=3))[-1] == "[DONE]"
    finally:
        engine.resume()
    wait_until(lambda: server.health() == 200, "/health is back")
    assert list(stream(server, model="single", max_tokens=3))[-1] == "[DONE]"


def test_requests_without_a_token_move_to_another_replica(server: ServeProcess) -> None:
    def wait_for_tokens(number: int) -> list[str]:
        return list(stream(server, prompt=[800 + number] * 40, max_tokens=5, seed=HOLD_SEED))

    HOLD.touch()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(wait_for_tokens, number) for number in range(8)]
        wait_until(lambda: num_running(server) == 8 and both_run(server), "all wait, on both")
        moved = migrations(server)
        replicas(server, "Engine-fast")[0].kill()
        wait_until(lambda: migrations(server) > moved, "the dead one's move")
        HOLD.unlink()
        results = [future.result(limits.patience_s()) for future in waiting]
    assert [json.loads(chunks[-2])["choices"][0]["finish_reason"] for chunks in results] == ["length"] * 8
    until_both_serve(server)


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "lost"), pytest.param(signal.SIGTERM, "moved", marks=pytest.mark.slow)]
)
def test_killed_replica(server: ServeProcess, client: openai.OpenAI, number: signal.Signals, reason: str) -> None:
    """Streams of that replica go on at the other one without a gap, and so do new requests. SIGTERM is no death."""
    whole = text_of(list(stream(server, max_tokens=900)))
    moved, all_moved = migrations(server, reason), migrations(server)
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(lambda: list(stream(server, max_tokens=900))) for _ in range(8)]
        wait_until(lambda: both_run(server), "both run")
        victim = replicas(server, "Engine-fast")[0]
        victim.send_signal(number)
        with limits.soon(15.0, "answers of the other replica"):  # no request waits for the dead one
            for _ in range(10):
                assert client.completions.create(model="fast", prompt=PROMPT, max_tokens=3).choices[0].text
        results = [future.result(limits.patience_s()) for future in running]
    assert [text_of(chunks) for chunks in results] == [whole] * 8
    assert 1 <= migrations(server, reason) - moved <= 7
    assert migrations(server, reason) - moved == migrations(server) - all_moved
    assert server.health() == 200
    until_both_serve(server)


@pytest.mark.slow
def test_a_stopped_replica_is_left_within_seconds(server: ServeProcess) -> None:
    """SIGSTOP: its streams wait neither for it nor for Serve's health check; once it goes on, it works for nobody."""

    def left() -> bool:
        logs = server.tmp.rglob("replica_manta_Ingress*.log")
        return any("no sign of life" in path.read_text(errors="replace") for path in logs)

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(lambda: list(stream(server, max_tokens=900))) for _ in range(8)]
        wait_until(lambda: both_run(server), "both run")
        victim = replicas(server, "Engine-fast")[0]
        victim.suspend()
        try:
            wait_until(left, "the ingress leaves it")
            results = [future.result(limits.patience_s()) for future in running]
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # Serve gives it up, too, if that took long
                victim.resume()
    assert all(chunks[-1] == "[DONE]" for chunks in results)
    wait_until(lambda: num_running(server) == 0, "nothing runs for nobody")
    until_both_serve(server)


def test_scale_down_lets_streams_finish(server: ServeProcess) -> None:
    """Serve takes one of two replicas out: its streams run to their end, then the replica goes."""

    def change(application: dict[str, Any]) -> None:
        application["deployments"] = [{"name": "Engine-fast", "num_replicas": 1}]

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(lambda: list(stream(server, max_tokens=1500))) for _ in range(8)]
        wait_until(lambda: both_run(server), "both run")
        server.deploy(change, limits.patience_s())
        results = [future.result(limits.patience_s()) for future in running]
    finishes = [json.loads(chunks[-2])["choices"][0]["finish_reason"] for chunks in results]
    assert finishes == ["length"] * 8
    wait_until(lambda: len(replicas(server, "Engine-fast")) == 1, "one replica is gone")
    assert list(stream(server, max_tokens=3))[-1] == "[DONE]"
    assert server.health() == 200


def test_lost_ingress_connection_leaves_no_request(server: ServeProcess) -> None:
    """kill -9 of the ingress: its requests are aborted in the engines, and a new ingress serves."""
    whole = num_whole(server)
    threads = [threading.Thread(target=_drain_quietly, args=(server,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    # All of them: HAProxy gives the new ingress what it had not handed on yet, and that would end well.
    wait_until(lambda: num_running(server) == len(threads), "they run")
    (ingress,) = replicas(server, "Ingress")
    ingress.kill()
    wait_until(lambda: server.health() == 200, "a new ingress")
    wait_until(lambda: num_running(server) == 0, "aborted")
    assert num_whole(server) == whole
    for thread in threads:
        thread.join(limits.patience_s())


def _drain_quietly(server: ServeProcess) -> None:
    try:
        for _ in stream(server, max_tokens=1900):
            pass
    except (httpx.HTTPError, AssertionError):
        pass


def test_every_ingress_tells_the_metrics_of_all(server: ServeProcess) -> None:
    """Behind a balancer each scrape meets another ingress: a series must neither vanish nor go back."""

    def change(application: dict[str, Any]) -> None:
        application["deployments"] = [
            {"name": "Engine-fast", "num_replicas": 1},
            {"name": "Ingress", "num_replicas": 2},
        ]

    def routed() -> dict[str, float]:
        """Prompts placed, by ingress, as told by whichever ingress the proxy chose."""
        families = text_string_to_metric_families(
            httpx.get(f"{server.base_url}/metrics", timeout=limits.patience_s()).text
        )
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == "manta:ingress_requests":
                found.setdefault(sample.labels["ingress"], 0.0)
            if sample.name == "manta:ingress_routes_total":
                found[sample.labels["ingress"]] = found.get(sample.labels["ingress"], 0.0) + sample.value
        return found

    def both_work() -> bool:
        list(stream(server, max_tokens=1))
        return min([*routed().values(), 0.0] if len(routed()) < 2 else routed().values()) > 0

    server.deploy(change, limits.patience_s())
    wait_until(both_work, "requests go through both ingresses", 60)
    last = routed()
    for _ in range(8):
        list(stream(server, max_tokens=1))
        now = routed()
        assert now.keys() == last.keys()
        assert sum(now.values()) == sum(last.values()) + 1
        assert all(now[ingress] >= last[ingress] for ingress in last)
        last = now
