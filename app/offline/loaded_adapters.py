"""The adapters that an `LLM` has loaded: when a prompt first asks for one, and again when its files have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress

from app.checkpoints.adapters.adapter_config import CONFIG_FILE
from app.checkpoints.adapters.adapter_files import WEIGHTS_FILE, adapter_directory
from app.engine import control
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.offline.lora_request import LoRARequest
from app.records.adapter import AdapterAsk

FileState = tuple[int, ...]


class LoadedAdapters:
    """Those of one engine."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        # State of the files and their digest, by directory.
        self._known: dict[str, tuple[FileState, bytes]] = {}

    def of_prompts(
        self, asked: LoRARequest | Sequence[LoRARequest | None] | None, count: int
    ) -> list[AdapterAsk | None]:
        """Returns what each of `count` prompts brings. InvalidRequestError, CheckpointError name what cannot be."""
        if asked is None or isinstance(asked, LoRARequest):
            return [self._ask(asked)] * count
        if not isinstance(asked, list | tuple) or len(asked) != count:
            what = f"{len(asked)} of them" if isinstance(asked, list | tuple) else type(asked).__name__
            raise InvalidRequestError(
                f"lora_request: expected LoRARequest(...), or a list with one for each of {count} prompts, not {what}",
                param="lora_request",
            )
        return [self._ask(one) for one in asked]

    def _ask(self, asked: LoRARequest | None) -> AdapterAsk | None:
        if asked is None:
            return None
        directory = os.path.abspath(adapter_directory(asked.lora_path))
        state, (known_state, digest) = _state(directory), self._known.get(directory, (None, b""))
        if known_state != state or digest not in self._core.adapters.loaded:
            digest = self._load(directory)
            self._known[directory] = state, digest
        return AdapterAsk(asked.lora_name, digest)

    def _load(self, directory: str) -> bytes:
        """Its digest; a directory is known by where it is, whatever prompts call it. The oldest one makes room."""
        known, most = self._core.adapters.known, self._core.config.max_cpu_loras
        name = hashlib.blake2b(directory.encode(), digest_size=16).hexdigest()
        if len(known) >= most and all(one.name != name for one in known):
            control.run(self._core, "unload_adapter", {"name": known[0].name})
        return bytes.fromhex(control.run(self._core, "load_adapter", {"name": name, "path": directory}))


def _state(directory: str) -> FileState:
    """Tells files from those that lay there before; what is not there, the load names."""
    found = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with suppress(OSError):
            stat = os.stat(os.path.join(directory, name))
            found += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
    return tuple(found)
