"""Tells gateways how busy the engines are, in the header of ORCA (open request cost aggregation) that Envoy, Istio and
the Gateway API's inference extension balance by: of a request that asks for it, and in the form that it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ASKED = "endpoint-load-metrics-format"
ANSWERED = "endpoint-load-metrics"

LoadFigures = Callable[[], Mapping[str, float]]


def _text(figures: Mapping[str, float]) -> str:
    return ", ".join(f"named_metrics.{name}={value}" for name, value in figures.items())


def _json(figures: Mapping[str, float]) -> str:
    return json.dumps({"named_metrics": figures})


_FORMATS: Mapping[str, Callable[[Mapping[str, float]], str]] = {"TEXT": _text, "JSON": _json}


class LoadHeader:
    """Adds the header to answers of `paths`. Where the application's state has no `engine_load`, nobody measures."""

    def __init__(self, app: ASGIApp, paths: Collection[str]) -> None:
        self._app = app
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(ASKED, "").strip().upper()
        measure: LoadFigures | None = getattr(scope["app"].state, "engine_load", None)
        if asked not in _FORMATS or measure is None:
            await self._app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[ANSWERED] = f"{asked} {_FORMATS[asked](measure())}"
            await send(message)

        await self._app(scope, receive, send_with_load)
