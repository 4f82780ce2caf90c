"""Memory held for clients: pictures beside bodies, each tenant's half, and what could never have room."""

from __future__ import annotations

import pytest

from app.api.http.held_bytes import HeldBytes, holding_of
from app.errors import InvalidRequestError, OverloadedError


def test_pictures_count_with_bodies_until_the_request_ends() -> None:
    held = HeldBytes(1000)
    first, second = (held.begin({"state": {}}, "t") for _ in range(2))
    first.add(100)
    first.add_picture(300)
    with pytest.raises(OverloadedError, match="requests in flight hold 400 bytes, which leaves it no room"):
        second.add_picture(101)
    assert held.total == 400
    first.give_back(50)
    second.add_picture(101)
    other = held.begin({"state": {}}, "another tenant")
    other.add_picture(500)
    assert held.total == 951
    for holding in (first, second, other):
        holding.release()
    assert held.total == 0


def test_who_goes_on_behind_a_request_gives_nothing_back_twice() -> None:
    held = HeldBytes(1000)
    one = held.begin({"state": {}}, "t")
    one.add_picture(300)
    one.release()
    assert held.total == 0
    one.give_back(300)
    one.take(200)
    assert one.grow(100)
    assert held.total == 0


def test_what_never_has_room_is_refused_for_good() -> None:
    held = HeldBytes(1000)
    one = held.begin({"state": {}}, "t")
    one.add_picture(400)
    with pytest.raises(InvalidRequestError, match="take 501 bytes with all before it; at most 500 are held") as caught:
        one.add_picture(101)
    assert not isinstance(caught.value, OverloadedError)
    assert held.total == 400


def test_nobody_counts_where_no_server_does() -> None:
    holding_of({"state": {}}).add_picture(1 << 40)
