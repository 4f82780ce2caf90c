"""The fleet as the operator's routes need it: something that asks all replicas of a model, and changes all or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from app.api.engine_client import Named, ReplicaAnswer
from app.api.http.json_response import JSONResponse
from app.errors import CheckpointError, ConfigError, InvalidRequestError

TIMEOUT_S = 600.0  # what a call may take where nobody says otherwise
MAX_TIMEOUT_S = 3600.0
# Control calls whose tensors the sender of new weights has brought.
SENT = frozenset({"receive_weights", "finish_weight_update"})


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
    """Answers with what each replica of a model says to a control call; InvalidRequestError where a directory is not
    what the operator believed, or a sender's tensors not what the model has."""
    try:
        return answer(await fleet.control(model, name, arguments, timeout_s))
    except (CheckpointError, ConfigError) as error:
        if name == "load_adapter":
            raise InvalidRequestError(error.message, param="lora_path") from error
        if "path" in arguments:  # here it is the operator's directory, not the server's
            raise InvalidRequestError(error.message, param="path") from error
        if name in SENT:
            raise InvalidRequestError(error.message, param="whole" if arguments.get("whole") else None) from error
        raise


def answer(answers: list[ReplicaAnswer]) -> JSONResponse:
    """Answers with what each replica says; the first error, with how many did it, is raised."""
    for one in answers:
        if (error := one.error) is not None:
            name = f"replica {one.replica_id}: " if one.replica_id else ""
            done = sum(other.error is None for other in answers)
            raise type(error)(f"{name}{error.message} ({done} of {len(answers)} replicas did it)", param=error.param)
    return JSONResponse({"results": [{"replica_id": one.replica_id, "result": one.result} for one in answers]})
