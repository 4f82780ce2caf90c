"""Loads and unloads low-rank adapters, while requests are computed."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.records.adapter import AdapterAsk, KnownAdapter

MOST_NAME_CHARS = 256
MOST_ADAPTERS = 1024  # with a name: each lies in host memory, and every heartbeat tells of it
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]


def load_adapter(core: EngineCore, name: Name, path: str, in_place: bool = True) -> str:
    """Have every worker take in the adapter in a directory, which each of their nodes has, and serve it under a name;
    its digest in hex digits. `in_place`: another one may have the name, and loses it. CheckpointError,
    InvalidRequestError and UnsupportedError name what is wrong with it; nothing is changed then."""
    if not core.config.enable_lora:
        raise InvalidRequestError("lora_path: this engine takes no adapters: enable_lora is off", param="lora_path")
    is_new = all(one.name != name for one in core.adapters.known)
    if is_new and len(core.adapters.known) >= MOST_ADAPTERS:
        raise InvalidRequestError(f"lora_name: {MOST_ADAPTERS} adapters are loaded: unload one", param="lora_name")
    digest = AdapterFiles.read(path, core.config.max_lora_rank).digest()
    if not (is_new or in_place or core.adapters.has(name, digest)):
        what = f"lora_name: {name!r} is another adapter's: give load_inplace, or unload that one"
        raise InvalidRequestError(what, param="lora_name")
    if digest not in core.adapters.loaded:
        try:
            core.call_workers("call_feature", "load_adapter", path, digest)
        except BaseException:
            core.call_workers("call_feature", "drop_adapter", digest)
            raise
    core.adapters.name(KnownAdapter(name, digest.hex(), path))
    _tidy(core)
    return digest.hex()


def unload_adapter(core: EngineCore, name: Name) -> bool:
    """Serve an adapter no longer; requests that run end with it. False: none has this name."""
    is_known = core.adapters.forget(name)
    _tidy(core)
    return is_known


def _tidy(core: EngineCore) -> None:
    """Drop those without a name that no request has."""
    asks = (request.spec.asked(AdapterAsk) for request in core.scheduler.requests.values())
    used = {ask.digest for ask in asks if ask is not None}
    for digest in core.adapters.nameless - used:
        core.adapters.drop(digest)
        core.call_workers("call_feature", "drop_adapter", digest)
