"""Text that grows by pieces: to add one copies nothing of what is there, and whoever reads it joins them once."""

from __future__ import annotations


class GrowingText:
    """`str` of it is the text so far."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        """Add to the end."""
        self._pieces.append(piece)

    def __str__(self) -> str:
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def __bool__(self) -> bool:
        return any(self._pieces)

    def clear(self) -> None:
        """Forget it."""
        self._pieces = []
