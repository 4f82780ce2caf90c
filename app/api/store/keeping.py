"""Keeps something beside an answer: a store that fails costs the client nothing but the later use."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any

from app.errors import MantaError

logger = logging.getLogger("manta.api")


async def is_kept(what: str, keeping: Awaitable[Any]) -> bool:
    """True once `what` is kept; False, and a line in the log, where it cannot be."""
    try:
        await keeping
    except MantaError as error:
        logger.warning("%s is not kept: %s", what, error.message)
        return False
    return True
