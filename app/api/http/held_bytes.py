"""Memory that is held for clients: counted from the byte that came to the moment that nobody holds it any more.

A body, and what its pictures became, counts while its request is under way. What goes on after the client has left,
such as a run under an `Idempotency-Key`, keeps the count for as long as it lasts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.types import Scope

from app.errors import InvalidRequestError, OverloadedError

SMALL_BYTES = 1 << 16  # what is no larger always finds room
_HOLDING = "holding"  # in a request's state


class HeldBytes:
    """At most `most` bytes in all, and half of that of one tenant."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()  # of each tenant

    def begin(self, scope: Scope, tenant: str) -> Holding:
        """Makes what the request of `scope` holds: nothing yet."""
        holding = Holding(self, tenant)
        scope.setdefault("state", {})[_HOLDING] = holding
        return holding

    def add(self, tenant: str, num_bytes: int) -> None:
        """Count so many more, or fewer."""
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    @property
    def total(self) -> int:
        """Bytes of all tenants."""
        return self._held.total()

    @property
    def most_of_tenant(self) -> int:
        """Most bytes of one tenant."""
        return self._most // 2

    def has_room(self, tenant: str, besides: int = 0) -> bool:
        """True if what is held is within the bounds; `besides`: bytes of the tenant that do not count here."""
        return self.total - besides <= self._most and self._held[tenant] - besides <= self.most_of_tenant


class Holding:
    """The bytes of one request. They are given back when the last of those has released them who keep them; whoever
    goes on behind that counts nothing."""

    def __init__(self, held: HeldBytes, tenant: str) -> None:
        self._held = held
        self._tenant = tenant
        self._num_bytes = 0
        self._num_keepers = 1

    def add(self, num_bytes: int, besides: int = 0) -> None:
        """Count bytes of a body that have come. OverloadedError when there is no room for more than a small one, where
        `besides` bytes that it holds do not count."""
        self.take(num_bytes)
        if self._num_bytes > SMALL_BYTES and not self._held.has_room(self._tenant, besides):
            raise OverloadedError(f"the bodies of requests in flight have {self._held.total} bytes together; try later")

    def add_picture(self, num_bytes: int) -> None:
        """Count what a picture became; errors as those of `add`, and InvalidRequestError where the request could never
        have room. The messages go on behind the name of the field."""
        if self._num_bytes + num_bytes > self._held.most_of_tenant:
            what = f"{self._num_bytes + num_bytes} bytes with all before it; at most {self._held.most_of_tenant}"
            raise InvalidRequestError(f"makes the request take {what} are held: send fewer or smaller ones")
        if not self.grow(num_bytes):
            what = f"requests in flight hold {self._held.total} bytes, which leaves it no room"
            raise OverloadedError(f"was not read: {what}; try later")

    def take(self, num_bytes: int) -> None:
        """Count further bytes, for which there must be room: what was begun goes on with them."""
        if self._num_keepers:
            self._num_bytes += num_bytes
            self._held.add(self._tenant, num_bytes)

    def give_back(self, num_bytes: int) -> None:
        """No longer count so many bytes."""
        self.take(-num_bytes)

    def grow(self, num_bytes: int) -> bool:
        """Count further bytes; False, and nothing is counted, where there is no room."""
        self.take(num_bytes)
        if self._held.has_room(self._tenant):
            return True
        self.take(-num_bytes)
        return False

    def keep(self) -> None:
        """One more must release it."""
        self._num_keepers += 1

    def release(self, _: Any = None) -> None:
        """Give the bytes back, unless somebody keeps them still; may be the callback of a task."""
        self._num_keepers -= 1
        if not self._num_keepers:
            self._held.add(self._tenant, -self._num_bytes)


def holding_of(scope: Scope) -> Holding:
    """Returns what the request of `scope` holds; one that is counted nowhere where no server counts."""
    found: Holding | None = scope.get("state", {}).get(_HOLDING)
    return uncounted() if found is None else found


def uncounted() -> Holding:
    """Makes what nobody else counts."""
    return Holding(HeldBytes(1 << 62), "")
