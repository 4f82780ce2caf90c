"""Which groups layers form, and how many blocks a request holds in them: against counting."""

from __future__ import annotations

import itertools

import pytest

from app.records.kv_groups import MAX_GROUPS, WHOLE, KVGroups, Window, choose_groups

GEMMA_3_27B: list[Window] = [None if layer % 6 == 5 else 1024 for layer in range(62)]


@pytest.mark.parametrize(
    ("layers", "length", "groups"),
    [
        ([None] * 32, 8192, WHOLE),
        ([4096] * 32, 32_768, (4096,)),
        ([4096] * 32, 4096, WHOLE),  # no request leaves the window
        ([4096, None] * 13, 8192, (None, 4096)),
        ([4096, 4096, 4096, None] * 8, 32_768, (None, 4096, 4096, 4096)),
        (GEMMA_3_27B, 32_768, (None, *(1024,) * 6)),
        (GEMMA_3_27B, 1024, WHOLE),
        ([None, 128, 128, 256, 256], 4096, (None, 256, 256, 128, 128)),
    ],
)
def test_groups_of_known_models(layers: list[Window], length: int, groups: tuple[Window, ...]) -> None:
    assert choose_groups(layers, length, 16) == groups


def test_no_other_grouping_takes_less_memory() -> None:
    for full, one, other in itertools.product(range(4), repeat=3):
        layers: list[Window] = [None] * full + [20] * one + [50] * other
        if not layers:
            continue
        sizes = range(1, len(layers) + 1)
        most = {size: [-(-count // size) for count in (full, other, one)] for size in sizes}
        tables = {size: (None,) * n[0] + (50,) * n[1] + (20,) * n[2] for size, n in most.items()}
        costs = [s * KVGroups(t, 4).num_blocks(200) for s, t in tables.items() if len(t) <= MAX_GROUPS]
        chosen = choose_groups(layers, 200, 4)
        size = (
            max(-(-layers.count(window) // chosen.count(window)) for window in chosen)
            if chosen != WHOLE
            else len(layers)
        )
        assert KVGroups(chosen, 4).num_blocks(200) * size == min(*costs, 50 * len(layers))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17, 40])
def test_what_lasts_is_the_window_and_what_is_being_written(window: int, block_size: int) -> None:
    groups = KVGroups((window,), block_size)
    for computed in range(1, 200):
        seen_by_next = range(max(0, computed - window + 1), computed + 1)
        first = groups.first_block(window, computed // block_size)
        assert first * block_size <= seen_by_next[0], "a block left that the next token sees"
        if computed % block_size == 0 and first:
            assert first * block_size + block_size > seen_by_next[0], "a block stayed that nobody sees"
        assert computed // block_size + 1 - first < groups.num_lasting(window)


@pytest.mark.parametrize("windows", [WHOLE, (9,), (None, 9, 9), (None, None, 33)])
def test_the_longest_request_is_the_longest_that_fits(windows: tuple[Window, ...]) -> None:
    groups = KVGroups(windows, 4)
    for num_blocks in range(200):
        longest = groups.max_tokens(num_blocks)
        if longest < 4 * ((1 << 26) - 1):  # of layers that all slide, any length fits in the end
            assert groups.num_blocks(longest) <= num_blocks < groups.num_blocks(longest + 1)
