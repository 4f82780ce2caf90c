"""The base class of the layers that every step calls."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module without hooks: a call is its `forward`, without the two Python frames and the checks between them that
    every layer of every step that is not replayed would pay for."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            cls.__call__ = cls.forward  # type: ignore[method-assign]
