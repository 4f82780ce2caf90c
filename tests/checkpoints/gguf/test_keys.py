"""Lists with an entry for each layer."""

from __future__ import annotations

from typing import Any

import pytest

from app.checkpoints.gguf.keys import Keys
from app.errors import MantaError


def keys(value: Any, *, zeros_are_none: bool = False) -> Keys:
    return Keys({"general.architecture": "llama", "llama.x": value}, zeros_are_none)


def test_layers_that_agree_have_one_value() -> None:
    assert keys([4, 4]).size("x") == 4
    assert keys([0, 0]).size("x") == 0
    assert keys([0, 4, 0, 4], zeros_are_none=True).size("x") == 4
    assert keys([0, 0], zeros_are_none=True).size("x") == 0


@pytest.mark.parametrize("zeros_are_none", [False, True])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], r"differs from layer to layer: \[\]"),
        ([2, 1], r"differs from layer to layer: \[2, 1\]"),
        ([[4], [4]], r"is \[\[4\]\], not a number of each layer"),
    ],
)
def test_other_lists_are_refused(value: list[Any], says: str, zeros_are_none: bool) -> None:
    with pytest.raises(MantaError, match=f"llama.x {says}"):
        keys(value, zeros_are_none=zeros_are_none).size("x")
