"""Where the lines of a replica go, by the handlers that Serve itself sets up in throughput mode."""

from __future__ import annotations

import builtins
import errno
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.serve._private import logging_utils
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from app.deployments.process.serve_logs import SERVE_LOGGER, log_to_serve_files


class _Full(io.StringIO):
    """A file on a disk that takes not one byte more."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        if self.num_writes > 200:
            pytest.fail("lines that cannot be written make others, without end")
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves Serve's and our logger as they were."""
    monkeypatch.setattr(logging, "raiseExceptions", True)
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


@pytest.mark.usefixtures("loggers")
def test_no_line_fails_whoever_writes_it_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a replica: what Python says of a line that it cannot write becomes a line itself."""
    for place, name in ((builtins, "print"), (sys, "stdout"), (sys, "stderr")):
        monkeypatch.setattr(place, name, getattr(place, name))  # as it was, in the end
    monkeypatch.setattr(logging_utils, "RAY_SERVE_LOG_TO_STDERR", False)  # throughput mode
    configure_component_logger(
        component_name="manta_Ingress",
        component_id="abc",
        component_type=ServeComponentType.REPLICA,
        logging_config=LoggingConfig(logs_dir=str(tmp_path)),
        max_bytes=1 << 20,
        backup_count=1,
        buffer_size=10,
    )
    log_to_serve_files()
    handlers = [one for one in logging.getLogger("manta").handlers if isinstance(one, logging.FileHandler)]
    (file,) = (one for one in handlers if Path(one.baseFilename).is_relative_to(tmp_path))  # not an earlier test's
    file.stream.close()
    file.stream = _Full()  # type: ignore[assignment]
    for number in range(30):
        logging.getLogger("manta.access").info("GET / %d", number)
        logging.getLogger(SERVE_LOGGER).error("a request failed")
