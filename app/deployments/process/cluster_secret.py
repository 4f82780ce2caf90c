"""The secret behind the block hashes (I5): one per cluster, never in arguments, environments or logs.

Either a mounted file, named by MANTA_BLOCK_HASH_KEY_FILE on every node, or 32 random bytes that the first replica to
ask puts into the cluster's key-value store.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from app.errors import ConfigError

KEY_FILE_VARIABLE = "MANTA_BLOCK_HASH_KEY_FILE"
MIN_KEY_BYTES = 16
_NAME = b"block_hash_key"
_NAMESPACE = b"manta"


def load_block_hash_key() -> bytes:
    """The cluster's 32-byte key. Blocks on the cluster's store: call it in a thread. ConfigError names a bad file."""
    path = os.environ.get(KEY_FILE_VARIABLE)
    return _from_file(Path(path)) if path else _from_cluster()


def _from_file(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{KEY_FILE_VARIABLE}: cannot read {path}: {error.strerror}", param=KEY_FILE_VARIABLE
        ) from error
    if len(content) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{KEY_FILE_VARIABLE}: {path} holds {len(content)} bytes; a key needs at least {MIN_KEY_BYTES}",
            param=KEY_FILE_VARIABLE,
        )
    return hashlib.blake2b(content, digest_size=32).digest()


def _from_cluster() -> bytes:
    # Put if absent, then read: whoever was first, all see the same key.
    _internal_kv_put(_NAME, secrets.token_bytes(32), overwrite=False, namespace=_NAMESPACE)
    key = _internal_kv_get(_NAME, namespace=_NAMESPACE)
    if not isinstance(key, bytes) or len(key) != 32:
        raise ConfigError("the cluster's key-value store holds no usable block-hash key")
    return key
