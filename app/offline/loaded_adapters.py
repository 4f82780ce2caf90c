"""The adapters that an `LLM` has loaded: each when a prompt first asks for it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from app.engine import control
from app.engine.control.adapters import MOST_NAME_CHARS
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.offline.lora_request import LoRARequest
from app.records.adapter import AdapterAsk


class LoadedAdapters:
    """Those of one engine."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._known: dict[str, bytes] = {}  # digests by directory

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
        directory = os.path.abspath(asked.lora_path)
        if directory not in self._known:
            self._known[directory] = bytes.fromhex(self._load(directory))
        return AdapterAsk(asked.lora_name, self._known[directory])

    def _load(self, directory: str) -> str:
        """Its digest; a directory is known by where it is, whatever prompts call it."""
        digest: str = control.run(self._core, "load_adapter", {"name": directory[-MOST_NAME_CHARS:], "path": directory})
        return digest
