"""Columns of several products: split wherever products end, and whole."""

from __future__ import annotations

import pytest
import torch

from app.layers.side_by_side import SideBySide


@pytest.mark.parametrize("of_products", [(12,), (7, 5), (3, 1, 8)])
@pytest.mark.parametrize("widths", [(12,), (7, 5), (4, 4, 4), (1, 2, 9)])
def test_columns_are_those_of_all_products(of_products: tuple[int, ...], widths: tuple[int, ...]) -> None:
    whole = torch.arange(36).view(3, 12)
    both = SideBySide(torch.split(whole, list(of_products), dim=1))
    assert len(both) == 3
    assert torch.equal(both.whole(), whole)
    for found, expected in zip(both.split(widths), torch.split(whole, list(widths), dim=1), strict=True):
        assert torch.equal(found, expected)


def test_columns_of_one_product_are_not_copied() -> None:
    first, second = torch.zeros(2, 6), torch.zeros(2, 2)
    found = SideBySide((first, second)).split((2, 4, 2))
    assert [part.untyped_storage().data_ptr() for part in found] == [
        one.untyped_storage().data_ptr() for one in (first, first, second)
    ]
