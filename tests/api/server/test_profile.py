"""/start_profile, /stop_profile and /memory_snapshot: what is asked of engines, and what comes back."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.engine_client import ReplicaAnswer
from app.api.server import profile
from app.api.server.app import create_app
from app.api.server.profile import profile_routes
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.engine.control import profile as controls
from app.errors import EngineDeadError, MantaError, UnsupportedError

FILES = ["/traces/1-rank-0.trace.json.gz", "/traces/1-rank-1.trace.json.gz"]


class Controlled:
    """Two replicas that answer as told, when told."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.errors: list[MantaError | None] = [None, None]
        self.recording = False
        self.stopped: asyncio.Event | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        self.asked.append((model, name, arguments))
        if name == "record_profile" and self.recording:
            self.stopped = asyncio.Event()
            await self.stopped.wait()
        if name == "stop_profile" and self.stopped is not None:
            self.stopped.set()
        pairs = zip(("r0", "r1"), self.errors, strict=True)
        return [ReplicaAnswer(name, None if error else FILES, error) for name, error in pairs]


@pytest.fixture
def engines(client: Any) -> Controlled:
    return Controlled(client)


def http(engines: Controlled, **ingress: Any) -> TestClient:
    app = create_app(engines, RequestLimits())  # type: ignore[arg-type]
    app.include_router(profile_routes(engines, IngressConfig(admin=True, **ingress)))  # type: ignore[arg-type]
    return TestClient(app)


def test_files_of_all_ranks(engines: Controlled) -> None:
    answer = http(engines, profile_directory="/traces").post("/start_profile")
    assert answer.status_code == 200, answer.text
    assert engines.asked == [("m", "record_profile", {"directory": "/traces", "num_steps": 50, "max_s": 30.0})]
    replicas = [{"replica_id": name, "files": FILES, "error": None} for name in ("r0", "r1")]
    assert answer.json() == {"model": "m", "status": "done", "replicas": replicas}


def test_a_recording_goes_on_behind_the_answer(engines: Controlled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "BEGIN_S", 0.05)
    engines.recording = True
    page = http(engines, profile_directory="/traces")
    with page:
        answer = page.post("/start_profile", json={"model": "alias", "num_steps": 3, "max_s": 2})
        assert answer.json() == {"model": "m", "status": "recording", "num_steps": 3, "max_s": 2.0}
        assert page.post("/stop_profile").json()["replicas"][0]["files"] == FILES


def test_a_recording_that_fails_behind_the_answer_is_logged_once(
    engines: Controlled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profile, "BEGIN_S", 0.05)
    engines.recording = True
    engines.errors = [None]  # too few: the call fails, as where no replica is left
    with http(engines, profile_directory="/traces") as page:
        page.post("/start_profile")
        assert engines.stopped is not None
        engines.errors = []
        assert page.post("/stop_profile").status_code == 500
    gc.collect()
    assert "the recording of a profile failed" in caplog.text
    assert "never retrieved" not in caplog.text


def test_refusals(engines: Controlled) -> None:
    closed = http(engines)
    for path in ("/start_profile", "/stop_profile", "/memory_snapshot"):
        refused = closed.post(path)
        assert refused.status_code == 400
        assert "ingress.profile_directory" in refused.json()["error"]["message"]
    page = http(engines, profile_directory="/traces")
    for body, field in (
        ({"num_steps": profile.MAX_STEPS + 1}, "num_steps"),
        ({"max_s": profile.MAX_S + 1}, "max_s"),
        ({"directory": "/etc"}, "directory"),
    ):
        assert page.post("/start_profile", json=body).json()["error"]["message"].find(field) >= 0
    assert page.post("/start_profile", json={"model": "nobody"}).status_code == 404
    assert page.post("/start_profile", headers={"origin": "http://elsewhere"}).status_code == 403
    assert engines.asked == []
    assert (profile.MAX_STEPS, profile.MAX_S) == (controls.MAX_STEPS, controls.MAX_S)


def test_what_replicas_refuse(engines: Controlled) -> None:
    page = http(engines, profile_directory="/traces")
    engines.errors = [UnsupportedError("no CUDA here"), UnsupportedError("no CUDA here")]
    refused = page.post("/memory_snapshot")
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "no CUDA here")
    engines.errors = [None, EngineDeadError("gone")]
    first, second = page.post("/memory_snapshot").json()["replicas"]
    assert (first["files"], second["files"]) == (FILES, [])
    assert second["error"] == "gone"
