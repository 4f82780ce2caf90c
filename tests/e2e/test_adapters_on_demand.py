"""Over a real Ray Serve: a name of a directory, or of a hub's adapter, is served from its first request on by all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.adapters import pair, write_adapter
from tests.checkpoints.hub_mirror import served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    for name in ("sql", "poems"):
        tensors = pair("model.layers.0.self_attn.q_proj", size_in=256, size_out=256)
        write_adapter(root / name, tensors)
    write_adapter(root / "wrong", pair("model.layers.0.self_attn.q_proj", size_in=255))
    write_adapter(root.parent / "outside")
    (root / "link").symlink_to(root.parent / "outside")
    return root


@contextmanager
def looking_up(options: dict[str, Any]) -> Iterator[ServeProcess]:
    """Two replicas of the built-in model, and where adapters are looked for."""

    def edit(config: dict[str, Any]) -> None:
        (model,) = config["applications"][0]["args"]["models"]
        model |= {"num_replicas": 2, **options}
        model.setdefault("engine", {}).update({"enable_lora": True, "device": "cpu", "num_threads": 1})

    with ServeProcess(
        ROOT / "configs/serve/quickstart.yaml", edit, ready_timeout_s=limits.patience_s(), ends_gracefully=False
    ) as process:
        yield process


@pytest.fixture(scope="module")
def server(adapters: Path) -> Iterator[ServeProcess]:
    with looking_up({"adapter_resolver": "directory", "adapter_directory": str(adapters)}) as process:
        yield process


def test_the_first_request_has_all_replicas_load_it(server: ServeProcess) -> None:
    with httpx.Client(base_url=server.base_url, timeout=limits.patience_s()) as http:

        def complete(model: str) -> httpx.Response:
            return http.post("/v1/completions", json={"model": model, "prompt": "Once", "max_tokens": 4})

        for name in ("sql", "poems", "sql"):
            answer = complete(name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == name
        for name, said in (("nothing", "does not exist"), ("wrong", "cannot be loaded"), ("link", "cannot be loaded")):
            answer = complete(name)
            assert (answer.status_code, said in answer.text) == (404, True), answer.text
            assert "/" not in answer.json()["error"]["message"], "a path of the server"
        listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert {"sql", "poems"} < set(listed)
        assert not {"wrong", "link", "nothing"} & set(listed)
        metrics = http.get("/metrics").text
        counts = [line for line in metrics.splitlines() if line.startswith("manta:ingress_adapter_lookups_total{")]
        assert {line.rpartition('outcome="')[2] for line in counts} == {'loaded"} 2.0', 'absent"} 1.0', 'failed"} 2.0'}


def test_a_hubs_adapter_is_downloaded_and_served(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(adapters) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # the suite's
            monkeypatch.delenv(name, raising=False)
        own = {"adapter_resolver": "hub", "adapter_directory": str(tmp_path), "adapter_repositories": ["org/*"]}
        with looking_up(own) as process, httpx.Client(base_url=process.base_url, timeout=limits.patience_s()) as http:
            found = {}
            for name in (*["org/model/sql"] * 2, "org/model/wrong", "org/nothing", "org/gated", "other/model"):
                answer = http.post("/v1/completions", json={"model": name, "prompt": "Once", "max_tokens": 4})
                found[name] = answer.status_code
        assert found == {name: 200 if name == "org/model/sql" else 404 for name in found}
        assert hub.downloaded.count("sql/adapter_model.safetensors") == 1
