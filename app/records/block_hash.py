"""The one identity of a prefix (I5): chained, keyed 128-bit hashes of KV blocks.

`block_hash` = BLAKE2b-128 (RFC 7693), keyed with the cluster's secret, over (parent hash, token ids, extras). Ingress,
router, KV manager, host tier and KV transfer all call these functions with the same secret, so equal hashes mean equal
prefixes and nobody without the secret can make or guess one. The root binds the model, adapter and tenant; a media
digest goes into `extras` of the blocks that contain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

HASH_BYTES = 16


def root_hash(key: bytes, *, model: str, cache_root: bytes = b"") -> bytes:
    """Parent of a prompt's first block: 16 bytes from the model's name (or revision) and the request's `cache_root`.

    `key` is the cluster's secret, 1 to 64 bytes.
    """
    name = model.encode()
    # The length in front keeps (model, cache_root) pairs apart that concatenate to the same bytes.
    return blake2b(len(name).to_bytes(4, "little") + name + cache_root, digest_size=HASH_BYTES, key=key).digest()


def hash_blocks(
    key: bytes,
    parent: bytes,
    token_ids: Sequence[int] | np.ndarray,
    block_size: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which start at a block edge; a last partial block has none.

    `extras[i]` are further bytes of the i-th of these blocks. Blocks of one key all have the same `block_size`, so
    tokens and extras cannot be mistaken for one another.
    """
    stride = 4 * block_size
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    hashes: list[bytes] = []
    for start in range(0, len(data) - stride + 1, stride):
        block = parent + data[start : start + stride]
        if extras and (extra := extras.get(start // stride)):
            block += extra
        parent = blake2b(block, digest_size=HASH_BYTES, key=key).digest()
        hashes.append(parent)
    return hashes
