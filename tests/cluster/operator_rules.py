"""What KubeRay's operator refuses in a RayService though the schema of its CRD allows it.

The rules of the operator's own validation, as far as they concern what these manifests use; and that each part is there
which the operator only looks for by name (ports, the first container).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_NAME = 41  # of a RayService: the names made of it must stay below 63 characters
DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
TOKEN_SINCE = (2, 52)
HEAD_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME")
START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def refusals(service: dict[str, Any]) -> Iterator[str]:
    """Why the operator would refuse this RayService, each as a line; none if it takes it."""
    name, spec = service["metadata"]["name"], service["spec"]
    if len(name) > MAX_NAME or not DNS_LABEL.fullmatch(name):
        yield f"name {name!r}"
    cluster = spec["rayClusterConfig"]
    if "upgradeStrategy" in cluster:
        yield "upgradeStrategy of the RayCluster inside"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "a name of the head service"
    yield from _upgrade(spec)
    yield from _token(cluster)
    yield from _fault_tolerance(cluster)
    yield from _autoscaling(cluster)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield from _group(group)
    if "serve" not in _port_names(cluster["headGroupSpec"]):
        yield "no port named serve: there would be no Service"


def _upgrade(spec: dict[str, Any]) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind, options = strategy.get("type"), strategy.get("clusterUpgradeOptions")
    if kind not in (None, "NewCluster", "None", "NewClusterWithIncrementalUpgrade"):
        yield f"upgrade {kind!r}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
        yield "an incremental upgrade without the autoscaler"
    if not options:
        yield "an incremental upgrade without clusterUpgradeOptions"
        return
    step, surge = options.get("stepSizePercent", -1), options.get("maxSurgePercent", 100)
    if not 0 <= step <= surge <= 100 or options.get("intervalSeconds", 0) <= 0 or not options.get("gatewayClassName"):
        yield f"clusterUpgradeOptions {options}"


def _token(cluster: dict[str, Any]) -> Iterator[str]:
    auth = cluster.get("authOptions", {})
    version = tuple(int(part) for part in cluster.get("rayVersion", "0").split(".")[:2])
    if auth.get("mode") == "token" and version < TOKEN_SINCE:
        yield f"a token with Ray {cluster.get('rayVersion')}"
    if auth.get("enableK8sTokenAuth"):
        yield "tokens of Kubernetes with a RayService"


def _fault_tolerance(cluster: dict[str, Any]) -> Iterator[str]:
    head, options = cluster["headGroupSpec"], cluster.get("gcsFaultToleranceOptions")
    variables = _variables(head)
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables:
            yield "RAY_REDIS_ADDRESS without gcsFaultToleranceOptions"
        return
    yield from (f"{name} beside gcsFaultToleranceOptions" for name in HEAD_VARIABLES if name in variables)
    if {"redis-password", "redis-username"} & head["rayStartParams"].keys():
        yield "redis-password in rayStartParams"
    redis = {"redisAddress", "redisPassword", "redisUsername"} & options.keys()
    if options.get("backend") == "rocksdb" and redis:
        yield f"rocksdb with {sorted(redis)}"
    if options.get("backend", "redis") == "redis" and "storage" in options:
        yield "redis with storage"


def _autoscaling(cluster: dict[str, Any]) -> Iterator[str]:
    groups = cluster["workerGroupSpecs"]
    if not cluster.get("enableInTreeAutoscaling"):
        if any("minReplicas" not in group or "maxReplicas" not in group for group in groups):
            yield "no bounds of replicas without the autoscaler"
        return
    version = cluster.get("autoscalerOptions", {}).get("version")
    if version and "RAY_enable_autoscaler_v2" in _variables(cluster["headGroupSpec"]):
        yield "the version of the autoscaler by the environment too"
    if version == "v2":
        policies = [group["template"]["spec"].get("restartPolicy") for group in (cluster["headGroupSpec"], *groups)]
        if any(policy not in (None, "Never") for policy in policies):
            yield f"restartPolicy {policies} with autoscaler v2"


def _group(group: dict[str, Any]) -> Iterator[str]:
    name = group.get("groupName", "head")
    if not group["template"]["spec"].get("containers"):
        yield f"{name}: no container"
    if group.get("resources") and set(START_RESOURCES) & group["rayStartParams"].keys():
        yield f"{name}: resources in two places"
    if "labels" in group["rayStartParams"]:
        yield f"{name}: labels in rayStartParams"
    if not 0 <= group.get("minReplicas", 0) <= group.get("maxReplicas", 1 << 30):
        yield f"{name}: bounds of replicas"


def _variables(group: dict[str, Any]) -> set[str]:
    return {entry["name"] for entry in group["template"]["spec"]["containers"][0].get("env", [])}


def _port_names(group: dict[str, Any]) -> set[str]:
    return {port["name"] for port in group["template"]["spec"]["containers"][0].get("ports", [])}
