"""Digests of media enter exactly the hashes of the blocks that hold them, and of those behind (I5)."""

from __future__ import annotations

from dataclasses import replace

from app.records.block_hash import hash_blocks
from app.records.media import MediaAsk, MediaItem, block_extras, media_of, with_pixels
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams

KEY, ROOT, SIZE = b"k" * 16, b"r" * 16, 4
TOKENS = list(range(24))
FIRST = MediaItem("image", b"a" * 16, offset=5, length=6, grid=(1, 2, 3), shape=(6,), pixels=b"pixels")
SECOND = replace(FIRST, digest=b"b" * 16, offset=13, length=2)


def hashes(*items: MediaItem) -> list[bytes]:
    asks = (MediaAsk(items),) if items else ()
    return hash_blocks(KEY, ROOT, TOKENS, SIZE, block_extras(asks, SIZE))


def num_equal(one: list[bytes], other: list[bytes]) -> int:
    """Leading blocks that are the same, behind which none may be."""
    equal = [a == b for a, b in zip(one, other, strict=True)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


def test_a_digest_changes_the_blocks_that_hold_it_and_what_follows() -> None:
    text = hashes()
    assert num_equal(text, hashes(FIRST)) == 1
    assert num_equal(hashes(FIRST), hashes(replace(FIRST, digest=b"c" * 16))) == 1
    assert num_equal(hashes(FIRST), hashes(FIRST, SECOND)) == 3
    assert num_equal(hashes(FIRST), hashes(replace(FIRST, pixels=b""))) == 6


def test_the_same_picture_elsewhere_in_a_block_is_another_block() -> None:
    assert num_equal(hashes(FIRST), hashes(replace(FIRST, offset=6))) == 1
    both = hashes(FIRST, SECOND)
    assert num_equal(both, hashes(replace(FIRST, digest=SECOND.digest), replace(SECOND, digest=FIRST.digest))) == 1


def test_blocks_hashed_later_have_the_extras_of_their_own_place() -> None:
    asks, whole = (object(), MediaAsk((FIRST, SECOND))), hashes(FIRST, SECOND)
    for first in range(1, 6):
        tokens, extras = TOKENS[first * SIZE :], block_extras(asks, SIZE, first)
        assert hash_blocks(KEY, whole[first - 1], tokens, SIZE, extras) == whole[first:]


def test_pixels_leave_a_request_and_come_back() -> None:
    ask, other = MediaAsk((FIRST, SECOND)), object()
    assert media_of((other, ask)) is ask
    request = EngineRequest("a", TOKENS, SamplingParams(), asks=(other, ask))
    light = with_pixels(request, lambda item: b"" if item is FIRST else item.pixels)
    assert light.asks == (other, MediaAsk((replace(FIRST, pixels=b""), SECOND)))
    assert with_pixels(light, lambda item: item.pixels or b"pixels") == request
    assert with_pixels(request, lambda item: item.pixels) is request
    text = replace(request, asks=(other,))
    assert with_pixels(text, lambda item: b"") is text
    assert block_extras((other,), SIZE) is None
