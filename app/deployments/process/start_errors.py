"""The one line on the console that says why a part of the application cannot start.

Serve keeps the traceback for its status and starts the replica again: without this line, whoever watches `serve run`
sees nothing at all.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeAlias

from app.errors import MantaError
from app.telemetry.logging import configure_logging

P = ParamSpec("P")
Constructor: TypeAlias = Callable[P, Coroutine[Any, Any, None]]

logger = logging.getLogger("manta.serve")


@contextmanager
def start_errors_logged(what: str) -> Iterator[None]:
    """Log what is raised inside, as one ERROR line that begins with `what`."""
    try:
        yield
    except Exception as error:
        configure_logging()
        logger.error("%s cannot start: %s", what, _reason(error))
        raise


def logs_start_error(what: str) -> Callable[[Constructor[P]], Constructor[P]]:
    """The same for a deployment's asynchronous constructor."""

    def decorate(constructor: Constructor[P]) -> Constructor[P]:
        @functools.wraps(constructor)
        async def logged(*args: P.args, **kwargs: P.kwargs) -> None:
            with start_errors_logged(what):
                await constructor(*args, **kwargs)

        return logged

    return decorate


def _reason(error: Exception) -> str:
    if isinstance(error, MantaError):
        return "; ".join(error.message.splitlines())
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
