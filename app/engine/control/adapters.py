"""Loads and unloads low-rank adapters, while requests are computed.

A request names its adapter by the digest of its files. One that is loaded under a name that another had before is
another adapter: requests that came before end with theirs.
"""

from __future__ import annotations

from collections.abc import Generator
from string import hexdigits

from app.checkpoints.adapters.adapter_files import DIGEST_BYTES, AdapterFiles
from app.engine.core import EngineCore
from app.errors import InvalidRequestError
from app.records.adapter import AdapterAsk


def load_adapter(core: EngineCore, path: str) -> str:
    """Have every worker take in the adapter in a directory, which each of their nodes has; its digest in hex digits.
    CheckpointError, InvalidRequestError and UnsupportedError name what is wrong with it; nothing is changed then."""
    if not core.config.enable_lora:
        what = "lora_path: this engine takes no adapters; start it with enable_lora"
        raise InvalidRequestError(what, param="lora_path")
    digest = AdapterFiles.read(path, core.config.max_lora_rank).digest()
    if digest not in core.adapters:
        try:
            core.call_workers("call_feature", "load_adapter", path, digest)
        except BaseException:
            core.call_workers("call_feature", "drop_adapter", digest)
            raise
    core.adapters.add(digest)
    return digest.hex()


def unload_adapter(core: EngineCore, digest: str) -> Generator[None, None, bool]:
    """Forget an adapter once its last request has ended; new ones are refused at once. False: it was not loaded."""
    if len(digest) != 2 * DIGEST_BYTES or not set(digest) <= set(hexdigits):
        raise InvalidRequestError(f"digest: {digest[:80]!r} is none of an adapter", param="digest")
    own = bytes.fromhex(digest)
    if own not in core.adapters:
        return False
    core.adapters.discard(own)
    while any(_adapter(request.spec.asked(AdapterAsk)) == own for request in core.scheduler.requests.values()):
        yield
    if own not in core.adapters:  # loaded again meanwhile
        core.call_workers("call_feature", "drop_adapter", own)
    return True


def _adapter(ask: AdapterAsk | None) -> bytes | None:
    return None if ask is None else ask.digest
