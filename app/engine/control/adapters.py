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
from app.engine.adapter_loads import take_in
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
    book, most, on_disk = core.adapters, core.config.max_cpu_loras, core.config.max_disk_loras
    is_new = all(one.name != name for one in book.known)
    if not (is_new or in_place or book.has(name, digest)):
        what = f"lora_name: {name!r} is another adapter's: give load_inplace, or unload that one"
        raise InvalidRequestError(what, param="lora_name")
    is_full = not on_disk and digest not in book.loaded and len(book.loaded) > most
    if (is_new and len(book.known) >= most + on_disk) or is_full:
        beside = f" and max_disk_loras={on_disk}" if on_disk else ""
        what = f"lora_name: max_cpu_loras={most}{beside} adapters are loaded: unload one"
        raise InvalidRequestError(what, param="lora_name")


def _digest(files: AdapterFiles) -> Generator[None, None, bytes]:
    with ThreadPoolExecutor(1, "adapter") as thread:
        found = thread.submit(files.digest)
        while not found.done():
            time.sleep(0.001)
            yield
        return found.result()
