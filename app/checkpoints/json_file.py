"""JSON files of a checkpoint, read within a bound: whatever lies there, a start takes no more memory than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.errors import CheckpointError

MOST_BYTES = 128 << 20  # the largest index of a published model has 20 MB


def read_json(file: Path, param: str = "model") -> Any:
    """Reads a file; CheckpointError where it cannot be read, is no JSON or is larger than MOST_BYTES."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        return json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}", param=param) from error


def read_object(file: Path, *, optional: bool = False, param: str = "model") -> dict[str, Any]:
    """The object that a file holds, {} where an `optional` one is not there; CheckpointError likewise."""
    if optional and not file.is_file():
        return {}
    loaded = read_json(file, param)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{file} is not a JSON object", param=param)
    return loaded
