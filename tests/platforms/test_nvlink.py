"""Whether GPUs are connected by NVLink is what the driver's library says of every pair."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from app.platforms import nvlink


class Library:
    """Stands in for the driver's: `links` are pairs of GPUs; `known` are those that there are."""

    def __init__(self, known: str, *links: str, init: int = 0) -> None:
        self.known, self.links, self.init, self.is_open = known, set(links), init, False

    def nvmlInit_v2(self) -> int:
        self.is_open = self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        name = uuid.decode()
        device._obj.value = self.known.find(name) + 1
        return 0 if name in self.known else 6

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, kind: int, status: Any) -> int:
        assert kind == 2
        pair = self.known[one.value - 1] + self.known[other.value - 1]
        status._obj.value = 0 if pair in self.links else 5
        return 0


@pytest.mark.parametrize(
    ("library", "asked", "expected"),
    [
        (Library("ab", "ab", "ba"), "ab", True),
        (Library("abc", "ab", "ba", "ac", "ca"), "ab", True),
        (Library("abc", "ab", "ba", "ac", "ca"), "abc", False),
        (Library("ab", "ab"), "ab", False),
        (Library("ab"), "a", True),  # ranks that share a GPU
        (Library("a"), "ab", False),
        (Library("ab", "ab", "ba", init=9), "ab", False),
    ],
)
def test_every_pair_counts(monkeypatch: pytest.MonkeyPatch, library: Library, asked: str, expected: bool) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert nvlink.have_nvlink(list(asked)) == expected
    assert not library.is_open


def test_no_driver_means_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Library:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not nvlink.have_nvlink(["a", "b"])
