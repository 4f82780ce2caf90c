"""The manifests of cluster/kuberay: what Kubernetes, KubeRay, Ray Serve and Manta each say to them."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.cli import COMMANDS
from app.cli.configuration import IMPORT_PATH, THROUGHPUT_MODE
from app.cli.parser import build_parser, parse
from app.config.serve import ServeConfig
from app.deployments.serve.haproxy import lost_settings
from app.deployments.serve.resources import replica_bundles
from app.deployments.serve.serve_args import parse_args
from tests.cluster.operator_rules import refusals
from tools.cluster_manifests import ROOT, made, variants

KUBERNETES = "1.34"
VARIANTS = sorted(variants())
SCHEMAS = os.environ.get("KUBERAY_SCHEMAS")  # directory with KubeRay's CRD schemas
Manifest = dict[str, Any]


def manifests(variant: str) -> list[Manifest]:
    return list(yaml.safe_load_all((ROOT / f"cluster/kuberay/{variant}.yaml").read_text()))


def of_kind(variant: str, kind: str, end: str = "") -> Manifest:
    (found,) = (each for each in manifests(variant) if each["kind"] == kind and each["metadata"]["name"].endswith(end))
    return found


def service(variant: str) -> Manifest:
    return of_kind(variant, "RayService")


def serve_document(variant: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(service(variant)["spec"]["serveConfigV2"])
    return document


def groups(variant: str) -> list[Manifest]:
    cluster = service(variant)["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: Manifest) -> Manifest:
    first: Manifest = group["template"]["spec"]["containers"][0]
    return first


def test_the_files_are_those_of_the_chart() -> None:
    for path, text in made().items():
        written = path.read_text() if path.is_file() else None
        assert written == text, f"{path.name}: run python -m tools.cluster_manifests"


@pytest.mark.parametrize("variant", VARIANTS)
def test_kubernetes_takes_them(variant: str) -> None:
    for manifest in manifests(variant):
        if manifest["kind"] != "RayService":
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for group in groups(variant):
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kuberays_schema_knows_every_field(variant: str) -> None:
    if SCHEMAS is None:
        pytest.skip("KUBERAY_SCHEMAS names no directory")
    check = jsonschema.Draft202012Validator(closed(json.loads((Path(SCHEMAS) / FILE).read_text())))
    assert [error.message for error in check.iter_errors(service(variant))] == []
    misspelled = copy.deepcopy(service(variant))
    misspelled["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParam"] = {}
    assert not check.is_valid(misspelled)


FILE = "rayservices.v1.schema.json"


def closed(schema: Any) -> Any:
    """The schema, in which fields that it does not list are errors, as they are to `kubectl apply`."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if "properties" in inner and not inner.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
        if inner["properties"].keys() >= {"spec", "status"}:
            inner["additionalProperties"] = True  # kind, apiVersion and metadata, which every object has
    return inner


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_takes_them(variant: str) -> None:
    assert list(refusals(service(variant))) == []


BREACHES: dict[str, Callable[[Manifest], Any]] = {
    "name": lambda s: s["metadata"].update(name="Manta"),
    "upgradeStrategy of": lambda s: s["spec"]["rayClusterConfig"].update(upgradeStrategy={"type": "Recreate"}),
    "without the autoscaler": lambda s: s["spec"]["rayClusterConfig"].update(enableInTreeAutoscaling=False),
    "clusterUpgradeOptions {": lambda s: s["spec"]["upgradeStrategy"]["clusterUpgradeOptions"].update(
        intervalSeconds=0
    ),
    "a token with Ray": lambda s: s["spec"]["rayClusterConfig"].update(rayVersion="2.51.0"),
    "tokens of Kubernetes": lambda s: s["spec"]["rayClusterConfig"]["authOptions"].update(enableK8sTokenAuth=True),
    "beside gcsFault": lambda s: head(s)["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "x"}),
    "rocksdb with": lambda s: s["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].update(backend="rocksdb"),
    "redis-password": lambda s: s["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update(
        {"redis-password": "x"}
    ),
    "restartPolicy": lambda s: s["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"].update(
        restartPolicy="Always"
    ),
    "by the environment too": lambda s: head(s)["env"].append({"name": "RAY_enable_autoscaler_v2", "value": "1"}),
    "bounds of replicas": lambda s: s["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(minReplicas=9),
    "no port named serve": lambda s: head(s).update(ports=[]),
}


def head(service: Manifest) -> Manifest:
    return container(service["spec"]["rayClusterConfig"]["headGroupSpec"])


@pytest.mark.parametrize("says", BREACHES)
def test_a_breach_of_a_rule_is_found(says: str) -> None:
    broken = copy.deepcopy(service("incremental-upgrade"))
    BREACHES[says](broken)
    assert any(says in line for line in refusals(broken))


@pytest.mark.parametrize("variant", VARIANTS)
def test_serve_and_manta_take_the_serve_configuration(variant: str) -> None:
    document = serve_document(variant)
    ServeDeploySchema.model_validate(document)
    (application,) = document["applications"]
    assert application["import_path"] == IMPORT_PATH
    config = parse_args(application["args"])
    made = {"Ingress", "Router", *(f"Engine-{model.name}" for model in config.models)}
    assert {entry["name"] for entry in application.get("deployments", [])} <= made


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_replicas_fit_into_the_pods(variant: str) -> None:
    """Bundles of all engine replicas, laid into the pods one by one as their strategy allows."""
    config = parse_args(serve_document(variant)["applications"][0]["args"])
    pods = [room for group in groups(variant)[1:] for room in _pods(group)]
    if not service(variant)["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]:
        assert all(group["replicas"] == group["maxReplicas"] for group in groups(variant)[1:])
    total = {kind: sum(pod[kind] for pod in pods) for kind in ("CPU", "GPU")}
    for model in config.models:
        for _ in range(model.max_replicas):
            bundles = replica_bundles(model, total)
            assert _lay(bundles, pods, model.placement_strategy), f"{model.name}: no room for {bundles} in {pods}"
    assert config.ingress.num_replicas <= len(pods)  # one a node


def _pods(group: Manifest) -> list[dict[str, float]]:
    requests = container(group)["resources"]["requests"]
    room = {"CPU": float(requests["cpu"]), "GPU": float(requests.get("nvidia.com/gpu", 0))}
    return [dict(room) for _ in range(group["maxReplicas"] * group["numOfHosts"])]


def _lay(bundles: list[dict[str, float]], pods: list[dict[str, float]], strategy: str) -> bool:
    if strategy == "STRICT_PACK":
        whole = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}
        bundles = [whole]
    for bundle in bundles:
        pod = next((p for p in pods if all(p[kind] >= amount for kind, amount in bundle.items() if kind in p)), None)
        if pod is None:
            return False
        for kind in pod:
            pod[kind] -= bundle.get(kind, 0)
    return True


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_containers_run_the_high_throughput_mode(variant: str) -> None:
    for group in groups(variant):
        environment = {entry["name"]: entry.get("value") for entry in container(group)["env"]}
        assert environment.items() >= THROUGHPUT_MODE.items()
        assert lost_settings(environment) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_runs_no_replica_and_may_be_lost(variant: str) -> None:
    spec = service(variant)["spec"]
    assert spec["excludeHeadPodFromServeSvc"] is True
    assert spec["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    redis = spec["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert redis["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "password"
    variables = {entry["name"] for entry in container(groups(variant)[0])["env"]}
    assert "MANTA_BLOCK_HASH_KEY_FILE" in variables  # or the key would lie in Redis


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pod_leaves_its_node_before_it_is_killed(variant: str) -> None:
    spec = service(variant)["spec"]
    for group in groups(variant)[1:]:
        command = container(group)["lifecycle"]["preStop"]["exec"]["command"]
        parsed = parse(build_parser(COMMANDS), command[1:])
        assert (command[0], parsed.command) == ("manta", "drain")
        deadline = parsed.deadline_s
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > deadline
        assert spec["rayClusterDeletionDelaySeconds"] >= deadline
        probes = {"livenessProbe", "readinessProbe", "startupProbe"} & container(group).keys()
        assert not probes  # KubeRay's know when Serve's proxy may be asked


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_secret_stands_in_a_manifest_and_ray_asks_for_its_token(variant: str) -> None:
    assert service(variant)["spec"]["rayClusterConfig"]["authOptions"]["mode"] == "token"
    assert not any(manifest["kind"] == "Secret" for manifest in manifests(variant))
    text = json.dumps(manifests(variant))
    assert not re.search(r'"name": "[A-Z_]*(PASSWORD|TOKEN|API_KEYS)", "value"', text)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nobody_but_clients_monitoring_and_operator_reaches_ray(variant: str) -> None:
    policy = of_kind(variant, "NetworkPolicy", "-ray")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    labels = {entry["key"]: entry["values"] for entry in policy["podSelector"]["matchExpressions"]}
    for group in groups(variant):
        own = group["template"]["metadata"]["labels"]
        assert all(own[key] in values for key, values in labels.items())
    reach: dict[str, set[int]] = {}
    for rule in policy["ingress"]:
        ports = {port["port"] for port in rule.get("ports", [])}
        for peer in rule.get("from", [{"everybody": True}]):
            namespace = peer.get("namespaceSelector", {}).get("matchLabels", {}).get("kubernetes.io/metadata.name")
            who = namespace or ("everybody" if "everybody" in peer else "the release")
            reach[who] = reach.get(who, set()) | ports
    metrics = {8000, 8080, 9101, 44217, 44227}
    assert reach == {
        "the release": set(), "everybody": {8000}, "monitoring": metrics, "kuberay-operator": {8265, 8000}
    }  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_two_nodes_are_drained_at_once(variant: str) -> None:
    budget = of_kind(variant, "PodDisruptionBudget", "-workers")["spec"]
    assert budget["maxUnavailable"] <= 1
    for group in groups(variant)[1:]:
        assert group["template"]["metadata"]["labels"].items() >= budget["selector"]["matchLabels"].items()


def test_the_pods_of_one_replica_come_and_go_together() -> None:
    (group,) = groups("gpu-pp2-multinode")[1:]
    config: ServeConfig = parse_args(serve_document("gpu-pp2-multinode")["applications"][0]["args"])
    (model,) = config.models
    assert group["numOfHosts"] == model.engine.pipeline_parallel_size
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == str(model.engine.tensor_parallel_size)
    assert service("gpu-pp2-multinode")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "manta"
