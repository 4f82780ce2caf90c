"""The ingress hashes prompts with pictures as engines do: the same tokens under other pictures are others (I5)."""

from __future__ import annotations

import asyncio

import msgspec

from app.deployments.router.prompt_hasher import PromptHasher
from app.records.block_hash import hash_blocks, root_hash
from app.records.media import MediaAsk, MediaItem, block_extras
from tests.deployments.routing.test_load_book import report

KEY, TOKENS = b"k" * 32, list(range(40))


def shown(digest: bytes) -> tuple[MediaAsk]:
    return (MediaAsk((MediaItem("image", digest * 16, 9, 10, (1, 2, 2), (1,), b"x"),)),)


def test_pictures_are_part_of_their_blocks() -> None:
    load = msgspec.structs.replace(report("a"), model_revision="r")
    size, root = load.block_size, root_hash(KEY, model=load.model_revision)
    found = [
        asyncio.run(PromptHasher(KEY).hash_prompt(TOKENS, b"", load, asks)) for asks in ((), shown(b"a"), shown(b"b"))
    ]
    for asks, hashes in zip(((), shown(b"a"), shown(b"b")), found, strict=True):
        extras = block_extras(asks, size)
        assert list(hashes) == hash_blocks(KEY, root, TOKENS[:-1], size, extras)
    assert len(set(found)) == 3
