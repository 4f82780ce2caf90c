"""Where the lines of a replica go, by the handlers that Serve itself sets up in throughput mode."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from app.deployments.serve_logs import SERVE_LOGGER, log_to_serve_files


@pytest.fixture
def loggers() -> Iterator[None]:
    """Leaves Serve's and our logger as they were."""
    kept = [(logger, list(logger.handlers)) for logger in map(logging.getLogger, (SERVE_LOGGER, "manta"))]
    yield
    for logger, handlers in kept:
        logger.handlers[:] = handlers


@pytest.mark.parametrize("encoding", ["TEXT", "JSON"])
@pytest.mark.usefixtures("loggers")
def test_lines_are_in_serves_file_at_once(tmp_path: Path, encoding: str) -> None:
    configure_component_logger(
        component_name="manta_Ingress",
        component_id="abc",
        logging_config=LoggingConfig(logs_dir=str(tmp_path), encoding=encoding),
        max_bytes=1 << 20,
        backup_count=1,
        buffer_size=1000,
    )
    log_to_serve_files()
    log_to_serve_files()
    logging.getLogger("manta.ingress").info("ready to %s", "serve")
    (file,) = tmp_path.iterdir()
    assert file.read_text().count("ready to serve") == 1
