"""Text that counts how many characters are copied as it is joined with more by `+`."""

from __future__ import annotations


class CountedText(str):
    """Every `+` that it takes part in adds to `num_copied`, and its result counts in turn."""

    num_copied = 0

    def __add__(self, other: str) -> CountedText:
        return self._count(str.__add__(self, other))

    def __radd__(self, other: str) -> CountedText:
        return self._count(str.__add__(other, self))

    @classmethod
    def _count(cls, text: str) -> CountedText:
        CountedText.num_copied += len(text)
        return cls(text)


def num_copied_by(pieces: int, take: object) -> int:
    """How many characters are copied while `take` (a call of one argument) takes so many pieces of one character."""
    assert callable(take)
    CountedText.num_copied = 0
    for _ in range(pieces):
        take(CountedText("\n"))
    return CountedText.num_copied
