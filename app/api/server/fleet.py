"""Routes that tools ask of a whole application: whether it takes requests (/ready), and which replicas there are to
scrape.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.engine_client import EngineClient
from app.api.http.json_response import JSONResponse
from app.api.http.request_log import REPLICA_PATH
from app.api.server.service import PROMETHEUS_TEXT
from app.errors import ModelNotFoundError, NotReadyError


class Fleet(EngineClient, Protocol):
    """An EngineClient over several replicas."""

    def why_not_ready(self) -> str | None:
        """Why a balancer should send nothing here now; None: it should."""
        ...

    async def replica_names(self) -> list[str]:
        """The replicas that have metrics: `engine:MODEL:INDEX`, `ingress:ID`, `router:ID`."""
        ...

    async def replica_metrics(self, name: str) -> str | None:
        """The exposition of one of them; None when it is not there, or does not answer."""
        ...


def fleet_routes(client: Fleet) -> APIRouter:
    """/ready, /metrics/targets, /metrics/replicas/NAME."""
    router = APIRouter(tags=["service"])

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 while every model has a replica that answers and there is room for requests, else 503."""
        if (why := client.why_not_ready()) is not None:
            raise NotReadyError(why)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics/targets")
    async def targets(request: Request) -> JSONResponse:
        """Targets for Prometheus (`http_sd_configs`): a page for each replica, all at the address that was asked."""
        address = request.headers.get("host", "localhost")
        return JSONResponse([_target(address, name) for name in await client.replica_names()])

    @router.get(REPLICA_PATH + "{name:path}")
    async def replica(name: str) -> Response:
        """Prometheus exposition of one replica."""
        text = await client.replica_metrics(name)
        if text is None:
            raise ModelNotFoundError(f"no replica {name[:256]!r} answers", param="name")
        return Response(text, media_type=PROMETHEUS_TEXT)

    return router


def _target(address: str, name: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"__metrics_path__": REPLICA_PATH + name, "instance": name}}
