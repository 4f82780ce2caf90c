"""The chart of cluster/helm by Helm itself: lint, the schema of its values, its own rules, and what values change."""

from __future__ import annotations

import os
import shlex
import subprocess
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

from app.config.serve import ServeConfig
from tools.cluster_manifests import CHART, render

Values = dict[str, Any]
INFO = 1  # severity: what lint says of charts without an icon


WORKERS: Values = yaml.safe_load((CHART / "values.yaml").read_text())["workers"][0]


def rendered(values: Values, kind: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(render(values, "other")) if each and each["kind"] == kind]


def cluster(values: Values) -> dict[str, Any]:
    (service,) = rendered(values, "RayService")
    found: dict[str, Any] = service["spec"]["rayClusterConfig"]
    return found


def test_lint_finds_nothing() -> None:
    report = lint(CHART, {}, strict=True)
    assert report["total_charts_linted"] == 1
    assert not report["errors"]
    assert [each for each in report["messages"] if each["severity"] > INFO] == []


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"imagge": {}}, "imagge"),
        ({"image": {"repository": "manta", "digest": "latest"}}, "digest"),
        ({"drain": {"deadlineSeconds": "10m"}}, "deadlineSeconds"),
        ({"upgrade": {"type": "Rolling"}}, "type"),
        ({"serve": {"models": []}}, "models"),
        ({"workers": [{"name": "GPU"}]}, "workers"),
        ({"workers": None}, "workers"),
        ({"serve": {"models": [{"name": "m", "engin": {}}]}}, "engin"),
        ({"serve": {"models": [{"name": "m", "engine": {"max_model_lenn": 1}}]}}, "max_model_lenn"),
        ({"serve": {"models": [{"name": "m", "engine": {"block_size": "big"}}]}}, "block_size"),
        ({"serve": {"ingress": {"num_replica": 2}}}, "num_replica"),
        ({"serve": {"admission": {"class": {}}}}, "class"),
        ({"image": {"repository": "r", "tag": ""}}, "tag"),
        ({"redis": {"existingSecret": "a: b"}}, "existingSecret"),
        ({"redis": {"address": "host:99999"}}, "address"),
        ({"models": {"source": "hostPath", "hostPath": "/a\nb: c"}}, "hostPath"),
        ({"env": {"A B": "c"}}, "A B"),
        ({"networkPolicy": {"collector": {"namespace": "Otel"}}}, "namespace"),
        ({"head": {"resources": {"requests": {"memory": "4 GB"}}}}, "memory"),
    ],
)
def test_the_schema_names_a_wrong_value(values: Values, names: str) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError, match=names):
        chart.validate_schema(values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"blockHashKey": {"existingSecret": ""}}, "blockHashKey.existingSecret: required"),
        ({"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}}, "autoscaler.enabled"),
        (
            {"upgrade": {"type": "NewClusterWithIncrementalUpgrade"}, "autoscaler": {"enabled": True}},
            "upgrade.gatewayClassName",
        ),
        ({"upgrade": {"stepSizePercent": 50, "maxSurgePercent": 10}}, "stepSizePercent"),
        ({"upgrade": {"deletionDelaySeconds": 60}}, "deletionDelaySeconds"),
        ({"batchScheduler": {"type": "kueue"}}, "batchScheduler.queue"),
        (
            {"batchScheduler": {"type": "kueue", "queue": "q"}, "autoscaler": {"enabled": True}},
            "Kueue admits a cluster of a fixed size",
        ),
        ({"redis": {"create": False}}, "redis.address"),
        ({"models": {"source": "persistentVolumeClaim"}}, "models.claimName"),
        ({"models": {"source": "hostPath"}}, "models.hostPath"),
        (
            {"extraEnv": [{"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "0"}]},
            "RAY_SERVE_ENABLE_HA_PROXY stands in env",
        ),
        ({"workers": [WORKERS, WORKERS]}, "two groups have the name cpu"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: Values, says: str) -> None:
    with pytest.raises(HelmError, match=says):
        render(values)


@pytest.mark.parametrize("name", ["123", "1e3", "a.b", "a" * 48])
def test_a_name_that_kuberay_takes_for_no_service_is_refused(name: str) -> None:
    with pytest.raises(HelmError, match="the release's name"):
        render({}, name)


@pytest.mark.parametrize("name", ["true", "null", "no", "on", "e1"])
def test_names_stay_text(name: str) -> None:
    """Of the release, and of all that values may name: YAML reads some words as something else."""
    values = {
        "workers": [{**WORKERS, "name": name}],
        "apiKeys": {"existingSecret": name},
        "blockHashKey": {"existingSecret": name},
        "rayToken": {"existingSecret": name},
        "redis": {"existingSecret": name, "storageClassName": name, "image": name, "tls": {"existingSecret": name}},
        "models": {"source": "persistentVolumeClaim", "claimName": name},
        "networkPolicy": {"monitoringNamespace": name, "operatorNamespace": name, "collector": {"namespace": name}},
        "batchScheduler": {"type": "volcano", "queue": name},
        "serviceMonitor": {"enabled": True, "apiKeySecret": {"name": name, "key": name}},
        "image": {"repository": "r", "tag": name},
        "env": {name: name},
    }
    for each in yaml.safe_load_all(render(values, name)):
        if each["kind"] == "RayService":
            config = each["spec"]["rayClusterConfig"]
            assert each["metadata"]["labels"]["volcano.sh/queue-name"] == name
            assert (config["authOptions"]["secretName"], config["workerGroupSpecs"][0]["groupName"]) == (name, name)
            for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
                template = group["template"]
                pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
                metadata = {"name": "pod", **template["metadata"]}
                kubernetes_validate.validate({**pod, "metadata": metadata}, "1.34", strict=True)
        elif "monitoring" not in each["apiVersion"]:
            kubernetes_validate.validate(each, "1.34", strict=True)


def test_what_pods_may_reach() -> None:
    def egress(values: Values) -> list[Any]:
        found: list[Any] = rendered({"networkPolicy": values}, "NetworkPolicy")[0]["spec"]["egress"]
        return found

    plain = egress({})
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} not in plain
    assert egress({"hub": True}) == [*plain, {"ports": [{"port": 443, "protocol": "TCP"}]}]
    (collector,) = egress({"collector": {"namespace": "otel"}})[len(plain) :]
    assert [port["port"] for port in collector["ports"]] == [4317, 4318]
    assert collector["to"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "otel"}
    hub = {"serve": {"models": [{"name": "m", "engine": {"model": "org/model"}}]}}
    assert "(org/model) is a hub's" in notes(hub)
    assert "is a hub's" not in notes(hub | {"networkPolicy": {"hub": True}})
    traces = {"env": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://otel:4318"}}
    assert "http://otel:4318, which" in notes(traces)
    assert "Traces" not in notes(traces | {"networkPolicy": {"collector": {"namespace": "otel"}}})


def test_sections_of_the_server_reach_it() -> None:
    values = {"serve": {"admission": {"breaker_faults": 5}, "admin": {"port": 8001}}}
    (service,) = rendered(values, "RayService")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    config = ServeConfig.model_validate(args)
    assert (config.admission.breaker_faults, config.admin.port) == (5, 8001)


@pytest.mark.parametrize("password", ["plain", 'with "quotes" and \\', "two words # and more"])
def test_redis_takes_any_password(password: str) -> None:
    """What the container's shell hands to Redis as its configuration, read as Redis reads it."""
    (stateful,) = rendered({}, "StatefulSet")
    (script,) = stateful["spec"]["template"]["spec"]["containers"][0]["args"]
    given = script.split(" |\n")[0] if " |\n" in script else script[: script.index("| exec")].rstrip()
    environment = {"REDIS_PASSWORD": password, "PATH": os.environ["PATH"]}
    line = subprocess.run(["sh", "-c", given], env=environment, capture_output=True, text=True, check=True).stdout
    assert shlex.split(line) == ["requirepass", password]


def test_a_digest_wins_over_a_tag() -> None:
    digest = "sha256:" + "0" * 64
    containers = cluster({"image": {"repository": "r", "tag": "t", "digest": digest}})["headGroupSpec"]["template"]
    assert containers["spec"]["containers"][0]["image"] == f"r@{digest}"


def test_redis_of_ones_own_over_tls() -> None:
    values = {"redis": {"create": False, "address": "redis.example.org:6380", "tls": {"enabled": True}}}
    spec = cluster(values)
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "rediss://redis.example.org:6380"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["RAY_REDIS_CA_CERT"] == "/etc/manta/redis-tls/ca.crt"
        assert "/etc/manta/redis-tls" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert not rendered(values, "StatefulSet")
    (policy,) = rendered(values, "NetworkPolicy")
    assert {"ports": [{"port": 6380, "protocol": "TCP"}]} in policy["spec"]["egress"]


def test_redis_of_the_chart_over_tls() -> None:
    (stateful,) = rendered({"redis": {"tls": {"enabled": True}}}, "StatefulSet")
    kubernetes_validate.validate(stateful, "1.34", strict=True)
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    assert "--port 0 --tls-port 6379" in script
    assert "requirepass" in script


def test_without_redis_the_head_may_not_be_evicted() -> None:
    values = {"redis": {"enabled": False}, "blockHashKey": {"existingSecret": ""}}
    assert "gcsFaultToleranceOptions" not in cluster(values)
    budgets = {each["metadata"]["name"]: each["spec"] for each in rendered(values, "PodDisruptionBudget")}
    assert budgets["other-head"]["maxUnavailable"] == 0
    assert "Without Redis" in notes(values)


def test_keys_come_from_a_secret() -> None:
    values = {"apiKeys": {"existingSecret": "keys"}, "rayToken": {"existingSecret": "token"}}
    spec = cluster(values)
    assert spec["authOptions"] == {"mode": "token", "secretName": "token"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert variables["MANTA_API_KEYS_FILE"] == "/etc/manta/api-keys/keys"
    assert "No API keys" in notes({})
    assert "No API keys" not in notes(values)


def test_a_batch_scheduler_takes_the_pods_together() -> None:
    (service,) = rendered({"batchScheduler": {"type": "volcano", "queue": "q"}}, "RayService")
    assert service["metadata"]["labels"]["volcano.sh/queue-name"] == "q"


def test_prometheus_operator_scrapes_each_once() -> None:
    values = {"serviceMonitor": {"enabled": True, "apiKeySecret": {"name": "scrape", "key": "key"}}}
    (monitor,) = rendered(values, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"]["name"] == "scrape"
    (pods,) = rendered(values, "PodMonitor")
    (service,) = rendered(values, "RayService")
    config = service["spec"]["rayClusterConfig"]
    named = {
        port["name"]
        for group in (config["headGroupSpec"], *config["workerGroupSpecs"])
        for port in group["template"]["spec"]["containers"][0]["ports"]
    }
    assert {endpoint["port"] for endpoint in pods["spec"]["podMetricsEndpoints"]} <= named


def notes(values: Values) -> str:
    with Chart.load(CHART) as chart:
        return next(text for path, text in chart.render(values).items() if path.endswith("NOTES.txt"))
