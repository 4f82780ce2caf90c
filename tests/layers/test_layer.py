"""A layer's call is its own forward, whoever defines it."""

from __future__ import annotations

from app.layers.layer import Layer


class Twice(Layer):
    def forward(self, x: int) -> int:
        return 2 * x


class Inherits(Twice):
    pass


class Thrice(Inherits):
    def forward(self, x: int) -> int:
        return super().forward(x) + x


def test_call_is_forward() -> None:
    assert [kind()(5) for kind in (Twice, Inherits, Thrice)] == [10, 10, 15]
    assert Thrice.__call__ is Thrice.forward
