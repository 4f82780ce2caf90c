"""The prefix identity: chained, keyed, independent of how the tokens are held."""

from __future__ import annotations

import time
from hashlib import blake2b

import numpy as np
import pytest

from app.records.block_hash import HASH_BYTES, hash_blocks, root_hash

KEY = b"k" * 32
ROOT = root_hash(KEY, model="m")


def test_one_hash_per_full_block() -> None:
    assert hash_blocks(KEY, ROOT, [], 4) == []
    assert len(hash_blocks(KEY, ROOT, list(range(3)), 4)) == 0
    assert len(hash_blocks(KEY, ROOT, list(range(4)), 4)) == 1
    assert [len(h) for h in hash_blocks(KEY, ROOT, list(range(11)), 4)] == [HASH_BYTES] * 2


def test_it_is_keyed_blake2b_over_parent_tokens_and_extras() -> None:
    tokens = [5, 6, 7, 1 << 30]
    data = np.array(tokens, "<i4").tobytes()
    expected = blake2b(ROOT + data + b"image", digest_size=16, key=KEY).digest()
    assert hash_blocks(KEY, ROOT, tokens, 4, extras={0: b"image"}) == [expected]


def test_a_chain_continues_where_it_stopped() -> None:
    tokens = list(range(40))
    whole = hash_blocks(KEY, ROOT, tokens, 8)
    assert whole[:2] + hash_blocks(KEY, whole[1], tokens[16:], 8) == whole


def test_lists_and_arrays_hash_alike() -> None:
    tokens = list(range(64))
    for dtype in (np.int32, np.int64, np.uint16):
        assert hash_blocks(KEY, ROOT, np.array(tokens, dtype), 16) == hash_blocks(KEY, ROOT, tokens, 16)


def test_everything_that_matters_changes_the_hash() -> None:
    tokens = list(range(16))
    variants = [
        hash_blocks(KEY, ROOT, tokens, 8),
        hash_blocks(b"other key", ROOT, tokens, 8),
        hash_blocks(KEY, root_hash(KEY, model="n"), tokens, 8),
        hash_blocks(KEY, root_hash(KEY, model="m", cache_root=b"tenant"), tokens, 8),
        hash_blocks(KEY, ROOT, [1, *tokens[1:]], 8),
        hash_blocks(KEY, ROOT, tokens, 8, extras={0: b"x"}),
    ]
    # The chain carries a change in the first block into the second.
    assert len({hashes[1] for hashes in variants}) == len(variants)


def test_extras_touch_their_block_and_what_follows_only() -> None:
    tokens = list(range(24))
    plain, marked = hash_blocks(KEY, ROOT, tokens, 8), hash_blocks(KEY, ROOT, tokens, 8, extras={1: b"x"})
    assert plain[0] == marked[0]
    assert plain[1] != marked[1]
    assert plain[2] != marked[2]


def test_model_and_cache_root_cannot_be_shifted_into_each_other() -> None:
    assert root_hash(KEY, model="ab", cache_root=b"c") != root_hash(KEY, model="a", cache_root=b"bc")


@pytest.mark.slow
def test_three_thousand_tokens_are_cheap() -> None:
    tokens = list(range(3000))
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        hash_blocks(KEY, ROOT, tokens, 16)
        best = min(best, time.perf_counter() - began)
    assert best < 1e-3  # measured 0.18 ms
