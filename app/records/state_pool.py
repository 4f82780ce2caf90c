"""Says what the workers keep of requests beside their blocks: states, whose size does not grow with a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StatePool:
    """Each running request has its states at the place of its row, so there are always enough of these."""

    num_bytes: int  # of one request's states
    num_kept: int = 0  # copies of states, from which requests with the same prefix go on; 0: prefixes are not found
