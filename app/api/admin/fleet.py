"""What the operator's routes need: something that asks all replicas of a model, and changes all of them or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse

from app.api.engine_client import Named, ReplicaAnswer
from app.errors import CheckpointError, ConfigError, InvalidRequestError

TIMEOUT_S = 600.0  # what a call may take where nobody says otherwise
MAX_TIMEOUT_S = 3600.0
# Control calls that an operator may make by name: their arguments and results are JSON, and no path is written to.
REMOTE = (
    "abort_requests", "check_weights", "describe", "pause", "reload_weights", "reset_prefix_cache", "resume", "sleep",
    "update_weights", "wake_up",
)  # fmt: skip


class Fleet(Protocol):
    """The replicas of all models."""

    @property
    def models(self) -> Mapping[str, Named]:
        """The models by name and by alias, the default first."""

    async def control(self, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> list[ReplicaAnswer]:
        """A control call (app/engine/control) to every replica, errors as values.

        A call that changes what replicas are is made by all of them or none: where one fails, the others are brought
        back, and the error says so. EngineDeadError where there is no replica.
        """

    async def describe(self) -> list[dict[str, Any]]:
        """Each model: what all its replicas are to be, and what each is."""

    async def drain(self, replica_id: str, is_drained: bool, move: bool) -> None:
        """Take one replica out of service, or back; `move`: what runs there goes on elsewhere at once.

        InvalidRequestError for an unknown one.
        """


async def called(fleet: Fleet, model: str, name: str, arguments: dict[str, Any], timeout_s: float) -> JSONResponse:
    """What each replica of a model answers to a control call; InvalidRequestError where a directory is not what the
    operator believed."""
    try:
        return answer(await fleet.control(model, name, arguments, timeout_s))
    except (CheckpointError, ConfigError) as error:
        if "path" not in arguments:
            raise
        # Here it is the operator's directory, not the server's.
        raise InvalidRequestError(error.message, param="path") from error


def answer(answers: list[ReplicaAnswer]) -> JSONResponse:
    """What each replica says; the first error, with how many did it, is raised."""
    for one in answers:
        if (error := one.error) is not None:
            name = f"replica {one.replica_id}: " if one.replica_id else ""
            done = sum(other.error is None for other in answers)
            raise type(error)(f"{name}{error.message} ({done} of {len(answers)} replicas did it)", param=error.param)
    return JSONResponse({"results": [{"replica_id": one.replica_id, "result": one.result} for one in answers]})
