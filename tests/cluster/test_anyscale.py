"""The service files of cluster/anyscale: Anyscale's fields, Serve's schema, Manta's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.cli.configuration import IMPORT_PATH, THROUGHPUT_MODE
from app.deployments.serve.serve_args import parse_args
from tools.cluster_manifests import ROOT

FILES = sorted((ROOT / "cluster/anyscale").glob("*.yaml"))
# Fields of ServiceConfig, ComputeConfig and the node groups in Anyscale's SDK 0.26.
SERVICE = {
    *("name", "image_uri", "containerfile", "compute_config", "working_dir", "excludes", "requirements", "env_vars"),
    *("py_modules", "py_executable", "cloud", "project", "registry_login_secret", "ray_version", "connections"),
    *("priority", "applications", "version_name", "query_auth_token_enabled", "http_options", "grpc_options"),
    *("logging_config", "proxy_location", "ray_gcs_external_storage_config", "tracing_config", "tags"),
}
SERVE = {"applications", "http_options", "grpc_options", "logging_config", "proxy_location"}
NODE = {
    *("instance_type", "resources", "required_resources", "labels", "required_labels", "advanced_instance_config"),
    *("flags", "cloud_deployment"),
}
GROUP = NODE | {"name", "min_nodes", "max_nodes", "market_type"}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    path: Path = request.param
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_anyscale_knows_the_fields(service: dict[str, Any]) -> None:
    assert service.keys() <= SERVICE
    compute = service["compute_config"]
    assert compute.keys() <= {"cloud", "head_node", "worker_nodes", "zones", "max_resources", "min_resources", "flags"}
    assert compute["head_node"].keys() <= NODE
    assert compute["head_node"]["resources"] == {"CPU": 0}
    for group in compute["worker_nodes"]:
        assert group.keys() <= GROUP
        assert group["min_nodes"] <= group["max_nodes"]
        assert group["market_type"] in ("ON_DEMAND", "SPOT", "PREFER_SPOT")


def test_serve_and_manta_take_the_application(service: dict[str, Any]) -> None:
    ServeDeploySchema.model_validate({key: value for key, value in service.items() if key in SERVE})
    (application,) = service["applications"]
    assert application["import_path"] == IMPORT_PATH
    parse_args(application["args"])


def test_all_processes_run_the_high_throughput_mode(service: dict[str, Any]) -> None:
    assert service["env_vars"].items() >= THROUGHPUT_MODE.items()
    assert service["applications"][0]["runtime_env"]["env_vars"].items() >= THROUGHPUT_MODE.items()
