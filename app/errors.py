"""Every error a user can meet, as one tree; each leaf knows its HTTP status.

    MantaError                      500  internal_error
    |- InvalidRequestError          400  invalid_request_error   (names the field in `param`)
    |  |- UnsupportedError          400  a known field or value we refuse by name
    |  `- PromptTooLongError        400  says both numbers
    |- AuthenticationError          401
    |- ModelNotFoundError           404
    |- OverloadedError              429  says when to come back
    |  `- ServerOverloadedError     503  whoever asks; the 429 is for one who has more under way than others
    |- DeadlineError                504  the request's own deadline passed
    |- EngineDeadError              503  the replica is gone or cannot make progress
    |  |- EngineAsleepError         503  it has given its memory back, or waits for weights
    |  `- EngineHeldError           503  an operator has all replicas wait, and the request has waited long enough
    |- NotReadyError                503  said by /ready: requests are better sent elsewhere
    |- PoisonedRequestError         500  engines died with it, one after another
    |- ConfigError                  (start-up) names the option and what to change
    `- CheckpointError              (start-up) names the file or the tensor

Errors that only a programmer can cause are asserts, not members of this tree.
"""

from __future__ import annotations

_MAX_MESSAGE_CHARS, _MAX_PARAM_CHARS = 2048, 256  # a client's own words come back in neither at any length


class MantaError(Exception):
    """Base of all user-visible errors.

    `status` is the HTTP status, `type` the OpenAI error type, `code` the OpenAI error code and
    `param` the request field at fault (dotted path), where there is one.
    """

    status: int = 500
    type: str = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries (Ray); keep the keyword-only field.
        return (_rebuild, (type(self), self.message, self.param))


def _rebuild(cls: type[MantaError], message: str, param: str | None) -> MantaError:
    return cls(message, param=param)


class InvalidRequestError(MantaError):
    """The request is malformed; `param` names the field. Of a long text that is quoted the ends are shown."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(_ends(message, _MAX_MESSAGE_CHARS), param=param and _ends(param, _MAX_PARAM_CHARS))


class ParameterError(InvalidRequestError, ValueError):
    """Python code passed a wrong parameter."""


def _ends(text: str, max_chars: int) -> str:
    half = max_chars // 2
    return text if len(text) <= max_chars else f"{text[:half]} ... {text[-half:]}"


class UnsupportedError(InvalidRequestError):
    """A field or value that is known to the dialect but not supported here."""

    code = "unsupported"


class PromptTooLongError(InvalidRequestError):
    """Prompt (plus the room asked for) exceeds the model's context or the whole KV cache."""

    code = "context_length_exceeded"


class AuthenticationError(MantaError):
    """Missing or wrong API key."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFoundError(MantaError):
    """No model is served under this name."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class OverloadedError(MantaError):
    """The server refuses new work of this tenant for now; `retry_after_s` is when it may have room."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_overloaded, (type(self), self.message, self.param, self.retry_after_s))


def _rebuild_overloaded(
    cls: type[OverloadedError], message: str, param: str | None, retry_after_s: float
) -> OverloadedError:
    return cls(message, param=param, retry_after_s=retry_after_s)


class ServerOverloadedError(OverloadedError):
    """The server refuses new work for now, whosever it is."""

    status = 503
    type = "service_unavailable_error"
    code = "server_overloaded"


class DeadlineError(MantaError):
    """The request's deadline passed before its end."""

    status = 504
    type = "timeout_error"
    code = "deadline"


class EngineDeadError(MantaError):
    """The engine that held the request died, or none is able to make progress."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class NotReadyError(MantaError):
    """This server should be sent nothing at the moment."""

    status = 503
    type = "service_unavailable_error"
    code = "not_ready"


class EngineAsleepError(EngineDeadError):
    """The engine has been put to sleep, or its weights have not come back; other replicas may serve."""

    code = "engine_asleep"


class EngineHeldError(EngineDeadError):
    """An operator holds all replicas; once they are let go, the request may be sent again."""

    code = "engine_held"


class PoisonedRequestError(MantaError):
    """Engine replicas died while the request ran on them, so it is sent to no further one."""

    code = "poisoned_request"


class ConfigError(MantaError):
    """An option is wrong or cannot be met; the message says which and what to change."""


class CheckpointError(MantaError):
    """A model directory is unusable; the message names the file or tensor."""
