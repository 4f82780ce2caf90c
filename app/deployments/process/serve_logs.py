"""Manta's log lines in Serve's own files too, where the Logs tab of Ray's dashboard looks for them."""

from __future__ import annotations

import logging

from app.telemetry.logging import configure_logging

SERVE_LOGGER = "ray.serve"


def log_to_serve_files() -> None:
    """Set up the logger `manta` of a Serve replica: to standard error, and to the replica's file; idempotent.

    Serve collects the lines for its file, a thousand in throughput mode, before it writes them; ours go to the file
    behind that at once.

    What cannot be written is dropped, as on a full disk. Python would say so on standard error, which Serve makes lines
    of its own file: each of them cannot be written either, and the event loop would do nothing else from there on.
    """
    logging.raiseExceptions = False
    logger = configure_logging()
    for handler in logging.getLogger(SERVE_LOGGER).handlers:
        file = getattr(handler, "target", handler)
        if isinstance(file, logging.FileHandler) and file not in logger.handlers:
            logger.addHandler(file)
