"""The models that come with the code, by name.

`tiny-chat-sees` is `tiny-chat` with a tower in front of it (LLaVA). Its own files hold the tower alone: the directory
is put together in the user's cache, once, with the text's tensors under the names of published checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.user_cache import kept_files

ASSETS = Path(__file__).resolve().parent.parent / "assets"
TEXT, SEES = "tiny-chat", "tiny-chat-sees"
BUILT_IN_MODELS = (TEXT, "tiny-chat-draft", "tiny-chat-eagle3", "tiny-chat-hears", SEES)
FRONT = "front.safetensors"
WEIGHTS = "model.safetensors"


def built_in_directory(name: str) -> Path:
    """The directory of one of BUILT_IN_MODELS."""
    return _whole() if name == SEES else ASSETS / name


@cache
def _whole() -> Path:
    """That of the model that sees, put together of files as they are now."""
    front = ASSETS / SEES
    files = {file.name: file.read_bytes() for file in front.iterdir() if file.is_file() and file.name != FRONT}
    shards = {
        "model-00001-of-00002.safetensors": _as_text(ASSETS / TEXT / WEIGHTS),
        "model-00002-of-00002.safetensors": _parsed(front / FRONT),
    }
    places: dict[str, str] = {}
    for name, (header, data) in shards.items():
        written = json.dumps(header).encode()
        files[name] = len(written).to_bytes(8, "little") + written + data
        places |= {tensor: name for tensor in header if tensor != "__metadata__"}
    total = sum(len(data) for _, data in shards.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return kept_files("built-in", SEES, files)


_Parsed = tuple[Mapping[str, Any], bytes]  # the header of a safetensors file, and what stands behind it


def _parsed(file: Path) -> _Parsed:
    SafetensorsHeader.read(file)  # which checks it
    content = file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:length]), content[length:]


def _as_text(file: Path) -> _Parsed:
    """The same with the names that tensors have in a model that sees."""
    header, data = _parsed(file)
    return {name if name == "__metadata__" else f"language_model.{name}": own for name, own in header.items()}, data
