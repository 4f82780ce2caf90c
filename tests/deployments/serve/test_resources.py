"""What replicas reserve, and the warning that names what a cluster lacks for them: every sum by hand."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import pytest
import ray
import yaml

from app.config.engine import EngineConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.app import build
from app.deployments.serve import resources
from app.deployments.serve.resources import node_shortage, num_ingresses, replica_bundles, shortages
from benchmarks.serve_process import ROOT

CONFIGS = sorted((ROOT / "configs/serve").glob("*.yaml"))
TP4: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 4}
HOST = {"CPU": 16.0, "GPU": 4.0}


def model(strategy: str = "STRICT_PACK", **engine: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "big", "placement_strategy": strategy, "engine": engine})


def test_shipped_configurations_fit_on_two_cpus() -> None:
    for path in CONFIGS:
        args = yaml.safe_load(path.read_text())["applications"][0]["args"]
        config = ServeConfig.model_validate(args)
        if any(model.engine.device == "cuda" for model in config.models):
            continue
        cpus = sum(sum(b["CPU"] for b in replica_bundles(model, {})) * model.num_replicas for model in config.models)
        assert cpus <= 2, path
        assert not shortages([config], {"CPU": 2}), path


def test_bundles() -> None:
    assert replica_bundles(ModelConfig(name="a"), {}) == [{"CPU": 0.1}, {"CPU": 1.0}]
    assert replica_bundles(ModelConfig(name="a"), {"GPU": 1}) == [{"CPU": 0.1}, {"CPU": 1.0, "GPU": 1.0}]
    cuda = ModelConfig(name="a", engine=EngineConfig(device="cuda"))
    assert replica_bundles(cuda, {}) == [{"CPU": 0.1}, {"CPU": 1.0, "GPU": 1.0}]
    half = ModelConfig(name="a", gpus_per_worker=0.5, cpus_per_worker=0, replica_cpus=0)
    assert replica_bundles(half, {}) == [{"CPU": 0.001}, {"GPU": 0.5}]
    in_process = ModelConfig(name="a", engine=EngineConfig(executor="in_process", device="cuda"))
    assert replica_bundles(in_process, {}) == [{"CPU": 1.1, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("nodes", "ingress", "number"),
    [
        ([], {}, 1),
        ([{"CPU": 64.0}], {}, 1),  # engines compute on these cores
        ([{"CPU": 2.0, "GPU": 1.0}], {}, 1),
        ([{"CPU": 8.0, "GPU": 1.0}], {}, 2),
        ([{"CPU": 2.0}, {"CPU": 16.0, "GPU": 1.0}], {}, 4),
        ([{"CPU": 128.0, "GPU": 8.0}] * 4, {}, 4),
        ([{"CPU": 128.0, "GPU": 8.0}], {"num_replicas": 1}, 1),
        ([{"CPU": 2.0}], {"num_replicas": 7}, 7),
        ([{"CPU": 128.0, "GPU": 8.0}], {"num_cpus": 1.0}, 1),
        ([{"CPU": 128.0, "GPU": 8.0}], {"limits": {"max_waiting_requests": 4096}}, 1),  # in all, as it was meant
        ([{"CPU": 128.0, "GPU": 8.0}], {"max_sockets": 10}, 1),
        ([{"CPU": 128.0, "GPU": 8.0}], {"max_sockets": 10, "num_replicas": 2}, 2),
        ([{"CPU": 128.0, "GPU": 8.0}], {"limits": {"max_n": 4}}, 4),
        ([{"CPU": 128.0, "GPU": 8.0}], {"media": {"max_decoders": 4}}, 1),
        ([{"CPU": 128.0, "GPU": 8.0}], {"media": {"max_images": 4}}, 4),
    ],
)
def test_ingresses_by_default(nodes: list[dict[str, float]], ingress: dict[str, Any], number: int) -> None:
    config = ServeConfig.model_validate({"models": [{"name": "a"}], "ingress": ingress})
    assert num_ingresses(config, nodes) == number


@pytest.mark.parametrize("admission", [{"tenants": {"a": {"max_requests": 8}}}, {"other_tenants": {"max_requests": 8}}])
def test_a_tenant_s_requests_are_counted_by_one_ingress_by_default(admission: dict[str, Any]) -> None:
    config = ServeConfig.model_validate({"models": [{"name": "a"}], "admission": admission})
    assert num_ingresses(config, [{"CPU": 128.0, "GPU": 8.0}]) == 1


def test_shortage_names_the_options() -> None:
    config = ServeConfig(models=(model(**TP4),))
    (gpus,) = shortages([config], {"CPU": 8.0})
    assert str(gpus) == (
        "4 GPU are needed, the cluster has 0: 4 for model 'big' (num_replicas=1 x engine.tensor_parallel_size=4 x "
        "engine.pipeline_parallel_size=1 x gpus_per_worker=1)"
    )
    cpus, _ = shortages([config], {"CPU": 4.0})
    assert (cpus.resource, cpus.has) == ("CPU", 4.0)
    assert cpus.need == pytest.approx(4.1)
    assert "replica_cpus=0.1 + engine.tensor_parallel_size=4 x" in str(cpus)
    assert not shortages([config], {"CPU": 4.1, "GPU": 4.0})


def test_shortage_adds_up_all_that_asks() -> None:
    """Each part fits by itself; together they do not."""
    two = {"models": [{"name": "a", "num_replicas": 2}, {"name": "b"}], "router": {"num_replicas": 3, "num_cpus": 0.5}}
    (cpus,) = shortages([ServeConfig.model_validate(two)], {"CPU": 4.0})
    assert cpus.need == pytest.approx(2 * 1.1 + 1.1 + 1.5)
    assert [demand.amount for demand in cpus.demands] == pytest.approx([1.5, 2.2, 1.1])  # the ingress asks for none
    assert "1.5 for the router (router.num_replicas=3 x router.num_cpus=0.5)" in str(cpus)


@pytest.mark.parametrize(
    ("strategy", "nodes", "says"),
    [
        ("STRICT_PACK", [HOST], None),
        ("STRICT_PACK", [{"CPU": 16.0, "GPU": 2.0}] * 2, "no node has 4.1 CPU and 4 GPU; placement_strategy=STRICT_"),
        ("PACK", [{"CPU": 16.0, "GPU": 2.0}] * 2, None),
        ("PACK", [{"CPU": 0.5, "GPU": 4.0}] * 8, "no node has 1 CPU and 1 GPU; one bundle of the replica needs that"),
        ("STRICT_SPREAD", [HOST] * 4, "placement_strategy=STRICT_SPREAD wants 5 nodes, the cluster has 4"),
        ("STRICT_SPREAD", [HOST] * 5, None),
    ],
)
def test_node_shortage(strategy: str, nodes: list[dict[str, float]], says: str | None) -> None:
    line = node_shortage(model(strategy, **TP4), nodes)
    assert line == says or (says is not None and line is not None and line.startswith("model 'big': ") and says in line)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(resources, "configure_logging", lambda: None)  # it would keep the records from caplog
    monkeypatch.setattr(logging.getLogger("manta"), "propagate", True)
    return caplog


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Nodes of a cluster that is up; one is gone."""
    nodes: list[dict[str, Any]] = [{"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}]

    def total() -> dict[str, float]:
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        return {name: sum(node.get(name, 0) for node in alive) for name in ("CPU", "GPU")}

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", total)
    return nodes


def test_build_warns_once(cluster: list[dict[str, Any]], said: pytest.LogCaptureFixture) -> None:
    cluster.append({"Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}})
    assert build({"models": [{"name": "big", "engine": TP4}]})
    (record,) = said.records
    assert record.levelno == logging.WARNING
    first, gpus, node = record.getMessage().splitlines()
    assert "wait until nodes are added" in first
    assert "4 GPU are needed, the cluster has 2" in gpus
    assert "STRICT_PACK puts a whole replica on one node" in node


def test_build_is_silent_when_all_fits(cluster: list[dict[str, Any]], said: pytest.LogCaptureFixture) -> None:
    cluster.append({"Alive": True, "Resources": HOST})
    assert build({"models": [{"name": "big", "engine": TP4}]})
    assert not said.records


def test_build_asks_nothing_without_ray(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> NoReturn:
        raise AssertionError("asked Ray, which is not up")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "nodes", never)
    monkeypatch.setattr(ray, "cluster_resources", never)
    assert build({"models": [{"name": "big", "engine": TP4}]})
    assert not said.records
