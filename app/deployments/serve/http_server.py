"""Readies the HTTP server that Serve runs in an ingress replica for whatever clients send.

Serve reads some headers by itself before the application is asked, and uvicorn hands websockets to a protocol of its
own. Both fail on what a stranger may send, outside of all that Manta's own middleware can answer. Serve asks the
function that `HOOK` names for middleware before it starts the server; middleware from there is the outermost.
"""

from __future__ import annotations

from ray.serve._private.constants import RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD as HAS_OWN_THREAD
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS

from app.api.http.busy_paths import BUSY_PATHS
from app.api.http.middleware import new_request_id

HOOK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:prepare"}  # environment of an ingress replica
_HTTP = "app.deployments.serve.http_protocol:HttpProtocol"
_WEBSOCKETS = "app.deployments.serve.websocket_protocol:WebSocketProtocol"
# Serve decodes them as UTF-8. It takes `-` and `_` in a name for the same.
_SERVE_HEADERS = frozenset(
    {
        b"serve-multiplexed-model-id",
        b"traceparent",
        b"tracestate",
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
        b"x-session-id",
    }
)
_ID = "x-request-id"
_UNWATCHED = "x-request-disconnect-disabled", "?1"


def prepare() -> list[Middleware]:
    """Have uvicorn speak HTTP and websockets our way; returns the middleware that Serve puts before its own."""
    HTTP_PROTOCOLS["auto"] = _HTTP
    WS_PROTOCOLS["auto"] = _WEBSOCKETS
    return [Middleware(ClientHeaders, is_watched=HAS_OWN_THREAD)]


class ClientHeaders:
    """Drops headers whose value Serve cannot read, and gives a request one id that can be echoed.

    Serve runs a task and a queue for each request to see that its client leaves. Where the application sees that
    itself, Serve is told not to, unless each client `is_watched`: Serve then hands on what uvicorn itself receives,
    which wakes nobody in the loop of another thread.
    """

    def __init__(self, app: ASGIApp, *, is_watched: bool) -> None:
        self._app = app
        self._unwatched = frozenset() if is_watched else BUSY_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if "headers" in scope:
            given = Headers(scope=scope).get(_ID)
            scope["headers"] = [pair for pair in scope["headers"] if _is_readable(*pair)]
            headers = MutableHeaders(scope=scope)
            headers[_ID] = new_request_id(given)
            if scope.get("path") in self._unwatched:
                headers[_UNWATCHED[0]] = _UNWATCHED[1]
        await self._app(scope, receive, send)


def _is_readable(name: bytes, value: bytes) -> bool:
    if name.replace(b"_", b"-") not in _SERVE_HEADERS:
        return True
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
