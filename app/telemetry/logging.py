"""Logging: one line per record on standard error, under the logger `manta`; level from MANTA_LOG_LEVEL, form from
MANTA_LOG_FORMAT (`text` or `json`).

In a Ray process standard error reaches the driver's console, so the choices made at start are seen by whoever runs
`serve run`. Prompts, outputs and secrets are never logged.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

from app.errors import ConfigError

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FORMATS = ("text", "json")
FIELDS = "manta_fields"  # the attribute of a record that holds further members of its JSON object, in Ray's JSON too


class JsonFormatter(logging.Formatter):
    """A JSON object for each record: ts, level, logger, msg, and what the record knows besides."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        ts = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "ts": f"{ts}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, FIELDS, {}), ensure_ascii=False, default=str)


def log_formatter() -> logging.Formatter:
    """The form of MANTA_LOG_FORMAT; ConfigError names an unknown one."""
    name = (os.environ.get("MANTA_LOG_FORMAT") or "text").lower()
    if name not in FORMATS:
        raise ConfigError(
            f"MANTA_LOG_FORMAT: unknown format {name!r}; {' or '.join(FORMATS)}", param="MANTA_LOG_FORMAT"
        )
    return JsonFormatter() if name == "json" else logging.Formatter(FORMAT)


def configure_logging(level: str | None = None) -> logging.Logger:
    """Set up the logger `manta` of this process; idempotent. ConfigError names an unknown level or format."""
    name = (level or os.environ.get("MANTA_LOG_LEVEL") or "INFO").upper()
    if name not in logging.getLevelNamesMapping():
        raise ConfigError(f"MANTA_LOG_LEVEL: unknown level {name!r}", param="MANTA_LOG_LEVEL")
    formatter = log_formatter()
    logger = logging.getLogger("manta")
    logger.setLevel(name)
    logger.propagate = False
    if not logger.handlers:
        # The process's own stream: Serve redirects sys.stderr into its log files.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    return logger
