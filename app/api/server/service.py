"""Routes about the server itself: /health, /live, /ping, /load, /metrics, /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from app.api.endpoint import Endpoint
from app.api.engine_client import EngineClient
from app.api.http.json_response import JSONResponse
from app.errors import EngineDeadError
from app.version import VERSION

PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def service_routes(client: EngineClient) -> APIRouter:
    """Makes the routes that operators and load balancers ask."""
    router = APIRouter(tags=["service"])

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 only if every model has a replica that can make progress, else 503."""
        if not await client.is_healthy():
            raise EngineDeadError("no replica of some model can make progress")
        return JSONResponse({"status": "ok"})

    @router.get("/live")
    async def live() -> JSONResponse:
        """200 as long as this process answers, whatever becomes of the engines and while it drains: for liveness."""
        return JSONResponse({"status": "alive"})

    for method in ("GET", "POST"):  # SageMaker asks by either
        router.add_api_route("/ping", health, methods=[method], description="As /health.", name=f"ping_{method}")

    @router.get("/load")
    async def load() -> JSONResponse:
        """Requests that run or wait in the engines of all models."""
        return JSONResponse({"server_load": _num_requests(await client.metrics_text())})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus exposition of all replicas."""
        return Response(await client.metrics_text(), media_type=PROMETHEUS_TEXT)

    @router.get("/version")
    async def version() -> JSONResponse:
        """Version of the server."""
        return JSONResponse({"version": VERSION})

    return router


def _num_requests(metrics: str) -> int:
    """Sum of the requests that run and that wait, over all series of an exposition."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    starts = tuple(name + end for name in names for end in ("{", " "))
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(starts)))


ENDPOINT = Endpoint(lambda api: service_routes(api.client))
