"""Layers that keep the same blocks of a context form a group: those that see all of it, and those that see a window.

A layer with a sliding window never reads again what has left the window, so its group gives these blocks back, while
the others keep theirs. All groups take their blocks from one pool, so a block has one size in bytes: that of as many
layers as the largest group has. Which groups there are follows from the windows of the whole model's layers, so every
rank comes to the same ones, and one set of block tables serves all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Window = int | None  # tokens that a layer sees, the token itself included; None: all
Windows = tuple[Window, ...]  # of the groups

WHOLE: Windows = (None,)
MAX_GROUPS = 8  # each one has a block table, and takes a block of its own at every block's edge
_MOST_BLOCKS = 1 << 26  # of a request: far more than any


@dataclass(slots=True, frozen=True)
class KVGroups:
    """Counts the blocks that a request holds in groups with these windows, those without one first."""

    windows: Windows
    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of a request with so many tokens, all but the last computed and no more than a block of them in a
        step: each group's, added up."""
        whole = -(-num_tokens // self.block_size)
        return sum(whole if window is None else min(whole, self.num_lasting(window)) for window in self.windows)

    def max_tokens(self, num_blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold."""
        counts = range(1, _MOST_BLOCKS)
        return self.block_size * bisect_right(counts, num_blocks, key=lambda n: self.num_blocks(n * self.block_size))

    @property
    def num_kept(self) -> int:
        """Blocks that no request gets: the one that entries of a table name whose block has left its window."""
        return int(self.windows != WHOLE)

    def num_requests(self, num_blocks: int, num_tokens: int) -> float:
        """Returns how many requests with so many tokens a cache of so many blocks holds."""
        return (num_blocks - self.num_kept) / self.num_blocks(num_tokens)

    def num_context_tokens(self, num_blocks: int, max_model_len: int) -> int:
        """Tokens that a cache of so many blocks holds, in requests of max_model_len tokens."""
        if self.windows == WHOLE:
            return num_blocks * self.block_size
        return int(self.num_requests(num_blocks, max_model_len) * max_model_len)

    def num_lasting(self, window: int) -> int:
        """Most blocks of a sliding group that a request holds on to: the window before the next token, which may begin
        anywhere in a block, the block that this token goes into, and one more, as a block leaves only once all tokens
        behind it are known."""
        return -(-(window - 1) // self.block_size) + 2

    def first_block(self, window: Window, num_blocks: int) -> int:
        """The first block that a token behind the first `num_blocks` blocks sees, or any token after it."""
        if window is None:
            return 0
        return max(0, num_blocks * self.block_size - window + 1) // self.block_size


def choose_groups(windows: Iterable[Window], max_model_len: int, block_size: int) -> Windows:
    """Groups for layers with these windows: those that let a request of max_model_len tokens take the least memory, and
    of equals the fewest, MAX_GROUPS at most. One of all layers (WHOLE) where that takes no more.

    A group has at most as many layers as a block has room for; a smaller one leaves the rest of its blocks unused.
    """
    layers = Counter(window if window is not None and window < max_model_len else None for window in windows)
    best, least = WHOLE, KVGroups(WHOLE, block_size).num_blocks(max_model_len) * layers.total()
    for size in range(layers.total(), 0, -1):
        groups = tuple(window for window in _in_order(layers) for _ in range(-(-layers[window] // size)))
        if len(groups) > MAX_GROUPS:
            break
        taken = KVGroups(groups, block_size).num_blocks(max_model_len) * size
        if taken < least:
            best, least = groups, taken
    return best


def _in_order(layers: Counter[Window]) -> list[Window]:
    """No window first, then the widest."""
    return sorted(layers, key=lambda window: (window is not None, -(window or 0)))
