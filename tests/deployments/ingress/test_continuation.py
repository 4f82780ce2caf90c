"""Streams go on when channels break under them: what a client reads is what it reads undisturbed, in every dialect.

Two real engines of tiny-chat behind channels in this process; a cut falls behind any token. The judge is the same
request without a cut (tests/api/test_over_engine.py holds that against transformers and the SDKs).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.deployments.ingress.continuation import MAX_QUARANTINED, QUARANTINE_S, Quarantine
from app.errors import PoisonedRequestError
from app.records.encoder_input import EncoderInput
from app.records.media import DIGEST_BYTES, MediaAsk, MediaItem
from app.records.pooling_params import PoolingParams
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.telemetry.metrics_recorder import Snapshot, decode_snapshot
from tests.deployments.over_tcp import be_patient
from tests.deployments.two_engines import TwoEngines
from tests.limits import run

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
STORY = [{"role": "user", "content": "Count from 1 to 30."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {"messages": STORY, "temperature": 0}),
    "sampled": (CHAT, {"messages": STORY, "temperature": 1.2, "top_p": 0.9, "seed": 7}),
    "penalties": (CHAT, {"messages": STORY, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "seed": 8}),
    "stop": (COMPLETIONS, {"prompt": "Count: 1, 2, 3,", "seed": 1, "stop": [" 19", "q"], "min_tokens": 5}),
    "json": (CHAT, {"messages": STORY, "seed": 3, "response_format": JSON}),
    "tools": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [WEATHER],
            "tool_choice": "required",
            "seed": 4,
        },
    ),
    "three choices": (CHAT, {"messages": STORY, "n": 3, "seed": 5, "temperature": 1.0}),
    "logprobs": (CHAT, {"messages": STORY, "logprobs": True, "top_logprobs": 2, "seed": 6}),
    "prompt logprobs": (COMPLETIONS, {"prompt": "Who are you?", "prompt_logprobs": 1, "seed": 9, "echo": True}),
    "long prompt": (COMPLETIONS, {"prompt": "Who are you? " * 60, "seed": 2}),
    "messages": (MESSAGES, {"messages": STORY, "temperature": 0.9}),
    "responses": (RESPONSES, {"input": "Count from 1 to 30.", "temperature": 0}),
}
SEEDLESS = (MESSAGES, RESPONSES)  # these dialects name no seed: greedy


@pytest.fixture(scope="module")
def engines() -> Iterator[TwoEngines]:
    engines = TwoEngines()
    yield engines
    engines.shutdown()


Scene = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def play(engines: TwoEngines, scene: Scene) -> Snapshot:
    """`scene` with a client of the server's application over both engines; the ingress's metrics."""

    async def main() -> Snapshot:
        await engines.start()
        transport = httpx.ASGITransport(create_app(engines, RequestLimits()))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://manta") as http:
                await scene(http)
            return decode_snapshot(engines.recorder.snapshot())
        finally:
            await engines.stop()

    return run(main())


async def ask(http: httpx.AsyncClient, path: str, body: dict[str, Any], **options: Any) -> str:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    whole = {"model": "tiny-chat", limit: 24, **body, **options}
    if path in SEEDLESS:
        whole["temperature"] = 0
    answer = await http.post(path, json=whole)
    assert answer.status_code == 200, answer.text
    return answer.text


VOLATILE = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "item_id",
    "response_id",
    "request_id",
    "call_id",
    "cached_tokens",
    "cache_read_input_tokens",
}
TEXTS = {"content", "text", "arguments", "partial_json", "delta", "thinking"}


def plain(value: Any) -> Any:
    """An answer without names and times; numbers as fp32 gives them, whatever the chunks of a prompt."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items() if name not in VOLATILE}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


def told(stream: str) -> dict[str, str]:
    """The texts of a stream, by choice and kind, and how it ended; what one event gathers is not fixed."""
    found: dict[str, str] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            number = f"{place}{value.get('index', '')}"
            for name, part in value.items():
                walk(part, f"{number}.{name}")
        elif isinstance(value, list):
            for part in value:
                walk(part, place)
        elif isinstance(value, str) and place.rpartition(".")[2] in (*TEXTS, "finish_reason", "stop_reason", "token"):
            found[place] = found.get(place, "") + value

    lines = stream.splitlines()
    for line in lines:
        if line.startswith("data: {"):
            walk(json.loads(line[6:]), "")
    return found


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_where_its_replica_was_lost(engines: TwoEngines, name: str) -> None:
    path, body = BODIES[name]
    rng = random.Random(name)
    cuts = rng.choice([1, rng.randrange(2, 12)]), rng.randrange(12, 20)

    async def scene(http: httpx.AsyncClient) -> None:
        whole = plain(json.loads(await ask(http, path, body)))
        streams = "prompt_logprobs" not in body
        streamed = told(await ask(http, path, body, stream=True)) if streams else None
        engines.scissors.cuts = [cuts[0]]
        assert plain(json.loads(await ask(http, path, body))) == whole, f"cut behind token {cuts[0]}"
        engines.scissors.cuts = [cuts[1]]
        if streams:
            assert told(await ask(http, path, body, stream=True)) == streamed, f"cut behind token {cuts[1]}"

    counts = play(engines, scene)
    lost = counts.values["manta:ingress_migrations_total"][("lost",)]
    assert lost >= 1
    assert counts.histograms["manta:ingress_migration_stall_seconds"][()].count == lost


def test_it_does_so_over_connections(engines: TwoEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)
    monkeypatch.setattr(engines, "is_over_tcp", True)

    async def scene(http: httpx.AsyncClient) -> None:
        for name, cuts in (("sampled", [7]), ("json", [3]), ("three choices", [10, 12])):
            path, body = BODIES[name]
            whole = plain(json.loads(await ask(http, path, body)))
            engines.scissors.cuts = cuts
            assert plain(json.loads(await ask(http, path, body))) == whole, name

    assert play(engines, scene).values["manta:ingress_migrations_total"][("lost",)] >= 3


def test_a_stream_outlives_two_losses(engines: TwoEngines) -> None:
    """The second one makes it a suspect, which has the next replica for itself; three choices take turns there."""

    async def scene(http: httpx.AsyncClient) -> None:
        path, body = BODIES["three choices"]
        whole = plain(json.loads(await ask(http, path, body)))
        engines.scissors.cuts = [10, 12]
        assert plain(json.loads(await ask(http, path, body))) == whole

    play(engines, scene)


def request(prompt: list[int], **params: Any) -> EngineRequest:
    return EngineRequest("r", prompt, SamplingParams(**params))


def test_quarantine_knows_a_request_by_prompt_and_parameters() -> None:
    now = 0.0
    quarantine = Quarantine(clock=lambda: now)
    quarantine.check(request([1]))
    assert "refused for 600 s" in str(quarantine.add(request([1, 2], seed=1, max_tokens=3)))
    quarantine.add(EngineRequest("p", [1, 2], PoolingParams()))
    for same in (request([1, 2], seed=2, max_tokens=3), EngineRequest("q", [1, 2], PoolingParams())):
        with pytest.raises(PoisonedRequestError, match="refused for another 600 s"):
            quarantine.check(same)
    for other in (request([1, 2], max_tokens=4), request([1, 3], max_tokens=3)):
        quarantine.check(other)
    now = QUARANTINE_S
    quarantine.check(request([1, 2], max_tokens=3))


def test_quarantine_tells_pictures_and_sounds_apart() -> None:
    def seeing(digest: bytes) -> EngineRequest:
        item = MediaItem("image", digest * DIGEST_BYTES, 1, 2, (1, 1, 1), (0,), b"")
        return EngineRequest("r", [1, 9, 9, 2], SamplingParams(), asks=(MediaAsk((item,)),))

    def hearing(digest: bytes) -> EngineRequest:
        return EngineRequest("r", [1, 9, 9, 2], SamplingParams(), asks=(EncoderInput("text", digest, 1, (0,), b""),))

    quarantine = Quarantine()
    for of in (seeing, hearing):
        quarantine.add(of(b"a"))
        with pytest.raises(PoisonedRequestError):
            quarantine.check(of(b"a"))
        quarantine.check(of(b"b"))


def test_quarantine_is_bounded() -> None:
    quarantine = Quarantine()
    for i in range(MAX_QUARANTINED + 1):
        quarantine.add(request([i]))
    quarantine.check(request([0]))
    with pytest.raises(PoisonedRequestError):
        quarantine.check(request([1]))


def test_a_quarantine_is_told_and_learns() -> None:
    now, told = 0.0, list[bytes]()
    mine = Quarantine(told.append, clock=lambda: now)
    other = Quarantine(clock=lambda: now)
    mine.add(request([1, 2]))
    now = 100.0
    assert mine.refused() == {told[0]: QUARANTINE_S - 100.0}
    other.refuse(mine.refused())
    with pytest.raises(PoisonedRequestError, match="refused for another 500 s"):
        other.check(request([1, 2]))
    assert len(told) == 1, "what is learnt is not told on"
    now = QUARANTINE_S
    assert mine.refused() == {}
    other.check(request([1, 2]))
