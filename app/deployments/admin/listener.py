"""An HTTP server of its own in a Serve replica, on the replica's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

import uvicorn
from starlette.types import ASGIApp

from app.errors import ConfigError

BIND_TRIES_S = 30.0  # the replica that this one replaces may still have the port
RETRY_S = 0.5
CLOSE_S = 5.0

logger = logging.getLogger("manta.admin")


class Listener:
    """Serves `app` from `start` to `close`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none",
            timeout_graceful_shutdown=int(CLOSE_S), server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def is_serving(self) -> bool:
        """True if it still serves."""
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Return once it is bound; ConfigError where that fails for good."""
        listening = await self._bind()
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def close(self) -> None:
        """Let what runs end, and leave the port."""
        if self._task is not None:
            self._server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, CLOSE_S + 1.0)

    async def _bind(self) -> socket.socket:
        deadline = time.monotonic() + BIND_TRIES_S
        while True:
            try:
                return self._open()
            except OSError as error:
                if time.monotonic() > deadline:
                    where = f"{self._host}:{self._port}"
                    raise ConfigError(f"admin.port: cannot listen at {where}: {error.strerror}") from error
            await asyncio.sleep(RETRY_S)

    def _open(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
        except BaseException:
            listening.close()
            raise
        return listening
