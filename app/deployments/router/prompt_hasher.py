"""Block hashes of prompts, as the ingress computes them for the Router: the same as the engines' own (I5)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.records.block_hash import HASH_BYTES, hash_blocks, root_hash
from app.records.load_report import LoadReport
from app.records.media import block_extras

LONG_PROMPT_TOKENS = 8192  # to hash more takes milliseconds: not on the event loop


class PromptHasher:
    """`key` is the cluster's secret."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    async def hash_prompt(
        self, token_ids: list[int], cache_root: bytes, load: LoadReport | None, asks: Sequence[object] = ()
    ) -> tuple[bytes, ...]:
        """Hashes of the prompt's full blocks, but for the last token: that one is always computed. `asks` are what its
        request brings: pictures are part of the blocks that hold them.

        Empty when no replica is known, or when they cache nothing.
        """
        if load is None or not load.model_revision:
            return ()
        if len(token_ids) > LONG_PROMPT_TOKENS:
            return await asyncio.to_thread(self._hash, token_ids, cache_root, load, asks)
        return self._hash(token_ids, cache_root, load, asks)

    def _hash(
        self, token_ids: list[int], cache_root: bytes, load: LoadReport, asks: Sequence[object]
    ) -> tuple[bytes, ...]:
        root = root_hash(self._key, model=load.model_revision, cache_root=cache_root)
        return tuple(hash_blocks(self._key, root, token_ids[:-1], load.block_size, block_extras(asks, load.block_size)))


def split_hashes(data: bytes) -> tuple[bytes, ...]:
    """The single hashes of several that were joined."""
    return tuple(data[i : i + HASH_BYTES] for i in range(0, len(data), HASH_BYTES))
