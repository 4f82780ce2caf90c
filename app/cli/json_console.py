"""The console of a server whose log is JSON: each line that Ray brings from a process is an object, without its prefix.

Ray would write `(ServeReplica:manta:Ingress pid=18885)` before each, in colours, to a file too.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

from app.telemetry.logging import JsonFormatter, log_formatter

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HANDLER = "ray_print_logs"  # the name under which Ray 2.60 keeps its own


def use_json_console() -> None:
    """Take the place of Ray's printing where MANTA_LOG_FORMAT is `json`; Ray must be up in this process."""
    if not isinstance(log_formatter(), JsonFormatter):
        return
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler(_HANDLER)
    dispatcher.add_handler(_HANDLER, print_lines)
    for name in ("ray", "ray.serve"):
        for handler in logging.getLogger(name).handlers:
            handler.setFormatter(JsonFormatter())


def print_lines(batch: dict[str, Any]) -> None:
    """Print the lines that one process wrote, as Ray hands them over."""
    for line in batch["lines"]:
        print(json_line(line, batch), file=sys.stderr if batch.get("is_err") else sys.stdout, flush=True)


def json_line(line: str, batch: dict[str, Any]) -> str:
    """A line of Manta's as it is; any other as an object of the same members, with who wrote it."""
    text = _COLOUR.sub("", line).rstrip()
    if text.startswith("{") and _is_object(text):
        return text
    level = text.partition(" ")[0]
    found = {
        "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "level": level if level in logging.getLevelNamesMapping() else "INFO",
        "logger": "ray",
        "msg": text,
        "process": batch.get("actor_name") or batch.get("task_name"),
        "pid": batch.get("pid"),
    }
    return json.dumps(found, ensure_ascii=False, default=str)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
