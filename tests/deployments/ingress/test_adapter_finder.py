"""Unknown names are looked up once, loaded once, and cost nothing afterwards, however many are asked for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.generation.served_models import load_served_model
from app.api.http.auth import ApiKeys
from app.api.server.app import create_app
from app.checkpoints.adapters.adapter_resolver import AdapterResolver
from app.config.limits import RequestLimits
from app.config.model import ModelConfig
from app.deployments.ingress import adapter_finder
from app.deployments.ingress.adapter_finder import AdapterFinder, create_resolvers
from app.errors import EngineDeadError, InvalidRequestError, MantaError, ModelNotFoundError, ServerOverloadedError
from app.records.adapter import AdapterAsk
from app.telemetry.metrics_recorder import MetricsRecorder, decode_snapshot
from tests.adapters import write_adapter
from tests.limits import patience_s, run, until

LOOKUPS = "manta:ingress_adapter_lookups_total"


class Directories(AdapterResolver):
    """Says what it was asked, and waits at a gate."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def find(self, name: str) -> Path | None:
        self.asked.append(name)
        assert self.gate.wait(patience_s())
        if name == "breaks":
            raise ZeroDivisionError
        return self.root / name if name.startswith("sql") else None


class Ingress:
    """The names of one ingress, and an Admin that loads what is found."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"base": None}
        self.loads: list[tuple[str, str, str]] = []
        self.error: MantaError | None = None
        self.resolver = Directories(Path("/adapters"))
        self.recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        self.finder = AdapterFinder({"base": self.resolver}, self.names, self.load, self.recorder)

    async def load(self, model: str, name: str, path: str) -> MantaError | None:
        self.loads.append((model, name, path))
        if self.error is None:
            self.names[name] = None
        return self.error

    @property
    def outcomes(self) -> dict[str, float]:
        return {labels[0]: count for labels, count in decode_snapshot(self.recorder.snapshot()).values[LOOKUPS].items()}


def test_many_requests_for_one_name_are_one_load() -> None:
    async def main() -> None:
        ingress = Ingress()
        await asyncio.gather(*(ingress.finder.learn("sql") for _ in range(20)))
        await ingress.finder.learn("sql")
        await ingress.finder.learn("base")
        assert ingress.loads == [("base", "sql", "/adapters/sql")]
        assert ingress.resolver.asked == ["sql"]
        assert ingress.outcomes == {"loaded": 1, "absent": 0, "failed": 0}

    run(main())


def test_what_is_not_there_is_looked_for_again_only_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        ingress = Ingress()
        for _ in range(5):
            await ingress.finder.learn("nothing")
        assert ingress.resolver.asked == ["nothing"]
        monkeypatch.setattr(adapter_finder, "ABSENT_S", 0.0)
        later = Ingress()
        for _ in range(2):
            await later.finder.learn("nothing")
        assert later.resolver.asked == ["nothing", "nothing"]
        assert later.outcomes["absent"] == 2

    run(main())


def test_names_without_end_are_no_work_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_finder, "MOST_ABSENT", 8)

    async def main() -> None:
        ingress = Ingress()
        for number in range(100):
            await ingress.finder.learn(f"n{number}")
        await ingress.finder.learn("x" * 257)
        assert ingress.resolver.asked == [f"n{number}" for number in range(8)]
        assert len(ingress.finder._absent) == 8

    run(main())


def test_few_names_are_looked_for_at_a_time() -> None:
    async def main() -> None:
        ingress = Ingress()
        ingress.resolver.gate.clear()
        most = adapter_finder.MOST_RUNNING
        waiting = [asyncio.create_task(ingress.finder.learn(f"sql{number}")) for number in range(most)]
        await until(lambda: len(ingress.finder._running) == most, "all are looked for")
        with pytest.raises(ServerOverloadedError, match="many adapters are being looked for"):
            await ingress.finder.learn("one more")
        waiting[0].cancel()  # its client has gone; the look-up goes on
        ingress.resolver.gate.set()
        await asyncio.gather(*waiting[1:])
        await until(lambda: not ingress.finder._running, "all have been looked for")
        assert len(ingress.loads) == most

    run(main())


@pytest.mark.parametrize("name", ["sql", "breaks"])
def test_what_cannot_be_loaded_is_said_without_a_path(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ingress = Ingress()
        ingress.error = InvalidRequestError("/adapters/sql: its rank is 99")
        for _ in range(3):
            with pytest.raises(ModelNotFoundError, match=rf"^the adapter '{name}' cannot be loaded: see the server"):
                await ingress.finder.learn(name)
        assert ingress.resolver.asked == [name]
        assert ingress.outcomes["failed"] == 1

    run(main())
    assert ("its rank is 99" if name == "sql" else "ZeroDivisionError") in caplog.text


def test_replicas_that_cannot_take_one_now_are_asked_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDKs try a 503 again, and never a 404."""
    monkeypatch.setattr(adapter_finder, "BUSY_S", 0.0)

    async def main() -> None:
        ingress = Ingress()
        ingress.error = EngineDeadError("the Admin does not answer")
        with pytest.raises(ServerOverloadedError, match=r"^the adapter 'sql' cannot be loaded now; try later"):
            await ingress.finder.learn("sql")
        ingress.error = None
        await ingress.finder.learn("sql")
        assert ingress.outcomes == {"loaded": 1, "absent": 0, "failed": 1}

    run(main())


def test_a_request_does_not_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_finder, "LOADED_S", 0.01)

    async def main() -> None:
        ingress = Ingress()
        ingress.resolver.gate.clear()
        with pytest.raises(ServerOverloadedError, match="is being loaded yet; try later"):
            await ingress.finder.learn("sql")
        ingress.resolver.gate.set()
        await until(lambda: "sql" in ingress.names, "it is loaded all the same")

    run(main())


def test_a_request_in_any_dialect_finds_it(tmp_path: Path) -> None:
    """Over the application: the first request for a name is answered, others get a 404."""
    write_adapter(tmp_path / "sql")
    values = {"engine": {"model": "tiny-chat", "enable_lora": True}, "adapter_resolver": "directory"}
    config = ModelConfig.model_validate({"name": "base", "adapter_directory": str(tmp_path), **values})
    base = load_served_model(config)
    client: Any = type("Client", (), {"models": {"base": base}})()

    async def load(model: str, name: str, path: str) -> MantaError | None:
        assert (model, path) == ("base", str(tmp_path / "sql"))
        client.models[name] = client.models[model].adapted(AdapterAsk(name, b"d" * 16), path)
        return None

    async def main() -> None:
        app = create_app(client, RequestLimits(), keys=ApiKeys())
        recorder = MetricsRecorder({"ingress": "i"}, scope="ingress")
        app.state.learn_name = AdapterFinder(create_resolvers([config]), client.models, load, recorder).learn
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for name, status in (("sql", 200), ("other", 404), ("../sql", 404), ("base", 200)):
                answer = await http.post("/tokenize", json={"model": name, "prompt": "hello"})
                assert answer.status_code == status, answer.text
            messages = [{"role": "user", "content": "hello"}]
            counted = await http.post("/v1/messages/count_tokens", json={"model": "sql", "messages": messages})
            assert counted.status_code == 200
        assert list(client.models) == ["base", "sql"]

    run(main())
