"""Over a real Ray Serve: a name that is a directory is served from its first request on, by both replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.serve_process import ROOT, ServeProcess
from tests import limits
from tests.adapters import pair, write_adapter

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


@pytest.fixture(scope="module")
def server(adapters: Path) -> Iterator[ServeProcess]:
    def edit(config: dict[str, Any]) -> None:
        (model,) = config["applications"][0]["args"]["models"]
        model |= {"num_replicas": 2, "adapter_resolver": "directory", "adapter_directory": str(adapters)}
        model.setdefault("engine", {}).update({"enable_lora": True, "device": "cpu", "num_threads": 1})

    with ServeProcess(
        ROOT / "configs/serve/quickstart.yaml", edit, ready_timeout_s=limits.patience_s(), ends_gracefully=False
    ) as process:
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
