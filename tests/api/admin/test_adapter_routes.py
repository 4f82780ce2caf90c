"""Adapters over the operator's routes: what reaches the fleet, and what is refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.api.admin.app import create_admin_app
from app.api.engine_client import ReplicaAnswer
from app.api.http.auth import ApiKeys
from app.config.admin import AdminConfig
from app.errors import CheckpointError
from app.telemetry.tenant_tokens import TenantLabels
from tests.adapters import write_adapter
from tests.api.admin.test_app import CONFIG, KEY, Fleet


def serve(*roots: Path) -> tuple[TestClient, Fleet]:
    fleet = Fleet()
    keys = ApiKeys.of_operators(AdminConfig(port=1), {"MANTA_ADMIN_KEYS": KEY})
    admin = CONFIG.admin.model_copy(update={"adapter_roots": tuple(map(str, roots))})
    app = create_admin_app(fleet, CONFIG.model_copy(update={"admin": admin}), keys, TenantLabels(b"secret"))
    return TestClient(app, headers={"authorization": f"Bearer {KEY}"}), fleet


def test_load_and_unload(tmp_path: Path) -> None:
    client, fleet = serve(tmp_path)
    path = str(write_adapter(tmp_path / "a"))
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path, "model": "n"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path, "load_inplace": True})
    assert fleet.asked == [
        ("m", "load_adapter", {"name": "a", "path": path, "in_place": in_place}) for in_place in (False, True)
    ]
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "a", "lora_int_id": 3})
    assert answer.status_code == 404, "no replica had it"
    assert "no adapter 'a' is loaded" in answer.json()["error"]["message"]

    async def removed(*_: Any) -> list[ReplicaAnswer]:
        return [ReplicaAnswer("a", True), ReplicaAnswer("b", True)]

    fleet.control = removed  # type: ignore[method-assign]
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'a' removed successfully.")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "/x"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/x"}, "lora_name"),
        ({"lora_name": "m", "lora_path": "{root}/a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "organisation/name"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "{root}/../elsewhere"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "a", "lora_path": "{root}/a", "surprise": 1}, "surprise"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, body: dict[str, Any], field: str) -> None:
    client, fleet = serve(tmp_path / "root")
    write_adapter(tmp_path / "root" / "a")
    given = {
        name: value.format(root=tmp_path / "root") if isinstance(value, str) else value for name, value in body.items()
    }
    answer = client.post("/v1/load_lora_adapter", json=given)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not fleet.asked


def test_nothing_is_loaded_without_roots_and_a_bad_directory_is_the_operators(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "a"))
    client, fleet = serve()
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
    assert answer.status_code == 400
    assert "under none of the directories" in answer.json()["error"]["message"]
    client, fleet = serve(tmp_path)
    fleet.error = CheckpointError("lora_A.weight holds numbers that are none", param="lora_path")
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": path})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_path"
