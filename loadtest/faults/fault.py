"""What a fault is: how it strikes, how it is healed, which deployment it needs."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from loadtest.faults.shapes import PAIR, Shape
from loadtest.faults.site import Site

# What a strike found besides: a sentence for each thing that ought not to be.
Strike = Callable[[Site, random.Random], Awaitable[list[str]]]
Heal = Callable[[Site], Awaitable[None]]


def always() -> str:
    """It can run here."""
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """One class of fault. While `strike` runs, clients go on asking if `keeps_on`."""

    name: str
    case: int  # in the list of 24 classes, docs/reliability.md
    what: str
    strike: Strike
    heal: Heal | None = None
    shape: Shape = PAIR
    ends_site: bool = False  # its deployment is of no further use
    leaves_marks: bool = False  # in a deployment that is whole again (a quarantine, say): the next run gets a new one
    keeps_on: bool = False
    is_long: bool = False  # a run takes more than a minute
    restore_s: float = 90.0  # what is not whole so long after the streams and the healing will not become so
    why: str = ""  # why some requests must see an error, if they must
    obstacle: Callable[[], str] = always  # why it cannot run on this machine; empty when it can
