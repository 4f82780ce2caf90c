"""Loads and unloads low-rank adapters, while requests are computed.

Files are read beside the steps: by a thread here, for the digest, and by one of each worker.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

from pydantic import Field

from app.checkpoints.adapters.adapter_files import AdapterFiles
from app.engine.adapters.loads import take_in
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.records.adapter import KnownAdapter

MOST_NAME_CHARS = 256
Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]


def load_adapter(core: EngineCore, name: Name, path: str, in_place: bool = True) -> Generator[None, None, str]:
    """Have every worker take in the adapter in a directory, which each of their nodes has, and serve it under a name;
    its digest in hex digits. `in_place`: another one may have the name, and loses it. CheckpointError,
    InvalidRequestError and UnsupportedError name what is wrong with it; nothing is changed then."""
    if not core.config.enable_lora:
        raise InvalidRequestError("lora_path: this engine takes no adapters: enable_lora is off", param="lora_path")
    files = AdapterFiles.read(path, core.config.max_lora_rank)
    core.call_workers("call_feature", "check_adapter", path)  # before all of it is read
    if _has_no_name_left(core, name):
        raise _no_room(core)  # before all of it is read, which may take long
    digest = yield from _digest(files)
    _check_room(core, name, digest, in_place)
    if digest not in core.adapters.loaded:
        yield from take_in(core, path, digest)
    core.adapters.name(KnownAdapter(name, digest.hex(), path))
    core.tidy_adapters()
    return digest.hex()


def unload_adapter(core: EngineCore, name: Name) -> bool:
    """Serve an adapter no longer; requests that run end with it. False: none has this name."""
    is_known = core.adapters.forget(name)
    core.tidy_adapters()
    return is_known


def _check_room(core: EngineCore, name: str, digest: bytes, in_place: bool) -> None:
    book, config = core.adapters, core.config
    if not (in_place or book.has(name, digest)) and any(one.name == name for one in book.known):
        what = f"lora_name: {name!r} is another adapter's: give load_inplace, or unload that one"
        raise InvalidRequestError(what, param="lora_name")
    is_full = not config.max_disk_loras and digest not in book.loaded and len(book.loaded) > config.max_cpu_loras
    if is_full or _has_no_name_left(core, name):
        raise _no_room(core)


def _has_no_name_left(core: EngineCore, name: str) -> bool:
    most = core.config.max_cpu_loras + core.config.max_disk_loras
    return len(core.adapters.known) >= most and all(one.name != name for one in core.adapters.known)


def _no_room(core: EngineCore) -> InvalidRequestError:
    most, on_disk = core.config.max_cpu_loras, core.config.max_disk_loras
    beside = f" and max_disk_loras={on_disk}" if on_disk else ""
    what = f"lora_name: max_cpu_loras={most}{beside} adapters are loaded: unload one"
    return InvalidRequestError(what, param="lora_name")


def _digest(files: AdapterFiles) -> Generator[None, None, bytes]:
    with ThreadPoolExecutor(1, "adapter") as thread:
        found = thread.submit(files.digest)
        while not found.done():
            time.sleep(0.001)
            yield
        return found.result()
