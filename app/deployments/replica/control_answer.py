"""Turns a control call of an engine replica into its answer: its result, or the error as a value."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from app.api.engine_client import ReplicaAnswer
from app.errors import EngineDeadError, MantaError

logger = logging.getLogger("manta.engine")


async def answer_of(replica_id: str, name: str, call: Coroutine[Any, Any, Any], timeout_s: float) -> ReplicaAnswer:
    """Returns what the call brings; its error is a value."""
    try:
        return ReplicaAnswer(replica_id, await asyncio.wait_for(call, timeout_s))
    except MantaError as error:
        return ReplicaAnswer(replica_id, error=error)
    except TimeoutError:
        return ReplicaAnswer(replica_id, error=EngineDeadError(f"{name}: not done within {timeout_s:g} s"))
    except Exception as error:  # a bug of ours ends the call, not the replica
        logger.exception("control call %s failed", name)
        return ReplicaAnswer(replica_id, error=MantaError(f"{name}: {type(error).__name__}: {error}"))
