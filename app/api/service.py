"""Routes about the server itself: /health, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from app.api.engine_client import EngineClient
from app.api.version import VERSION
from app.errors import EngineDeadError

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def service_routes(client: EngineClient) -> APIRouter:
    """What operators and load balancers ask."""
    router = APIRouter(tags=["service"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 only if every model has a replica that can make progress, else 503."""
        if not await client.is_healthy():
            raise EngineDeadError("no replica of some model can make progress")
        return JSONResponse({"status": "ok"})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus exposition of all replicas."""
        return Response(await client.metrics_text(), media_type=PROMETHEUS_TEXT)

    @router.get("/version")
    async def version() -> JSONResponse:
        """Version of the server."""
        return JSONResponse({"version": VERSION})

    return router
