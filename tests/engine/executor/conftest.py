"""One local Ray cluster for a test module; its workers find this repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[str]:
    """Address of a cluster of 4 CPUs, which this process has joined."""
    context = ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}},
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()
