"""Steps are planned for the places that captured ones have."""

from __future__ import annotations

import pytest

from app.records.step_places import DECODE_PLACES, FULL_PLACES, decode_places


@pytest.mark.parametrize(
    ("num_decodes", "places"), [(1, 16), (16, 16), (17, 24), (33, 40), (49, 64), (65, 96), (128, 128), (129, 129)]
)
def test_the_next_larger_number_of_places(num_decodes: int, places: int) -> None:
    assert decode_places(num_decodes) == places
    assert sorted(DECODE_PLACES) == [*DECODE_PLACES]
    assert not {*DECODE_PLACES} & {*FULL_PLACES}
