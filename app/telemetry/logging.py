"""Logging: one line per record on standard error, under the logger `manta`; level from MANTA_LOG_LEVEL.

In a Ray process standard error reaches the driver's console, so the choices made at start are seen by whoever runs
`serve run`. Prompts, outputs and secrets are never logged.
"""

from __future__ import annotations

import logging
import os
import sys

from app.errors import ConfigError

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str | None = None) -> logging.Logger:
    """Set up the logger `manta` of this process; idempotent. ConfigError names an unknown level."""
    name = (level or os.environ.get("MANTA_LOG_LEVEL") or "INFO").upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(f"MANTA_LOG_LEVEL: unknown level {name!r}", param="MANTA_LOG_LEVEL")
    logger = logging.getLogger("manta")
    logger.setLevel(name)
    logger.propagate = False
    if not logger.handlers:
        # The process's own stream: Serve redirects sys.stderr into its log files.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
    return logger
