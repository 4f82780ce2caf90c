"""The HTTP application of the operator's listener. Every route but /health asks for an operator's key."""

from __future__ import annotations

from fastapi import FastAPI

from app.api.admin.adapter_routes import LoadAdapterRequest, UnloadAdapterRequest, adapter_routes
from app.api.admin.engine_routes import engine_routes
from app.api.admin.fleet import Fleet
from app.api.admin.replica_routes import RpcRequest, replica_routes
from app.api.admin.tenant_routes import tenant_routes
from app.api.admin.weight_routes import FinishRequest, InitRequest, ReloadRequest, UpdateRequest, weight_routes
from app.api.http.auth import ApiKeys, Authentication
from app.api.http.body import add_body_schemas
from app.api.http.errors import install_error_handlers
from app.api.http.held_bytes import HeldBytes
from app.api.http.joined_routes import join_routes
from app.api.http.json_response import JSONResponse
from app.api.http.middleware import BodyLimit, BodyTimes, HeaderLimit, RequestContext, RequestLimit
from app.api.http.work_pool import WorkPool
from app.api.server.profile import profile_routes
from app.api.server.server_info import server_info_routes
from app.config.serve import ServeConfig
from app.telemetry.tenant_tokens import TenantLabels
from app.version import VERSION

BODIES = (
    *(RpcRequest, UpdateRequest, ReloadRequest, InitRequest, FinishRequest),
    *(LoadAdapterRequest, UnloadAdapterRequest),
)
MAX_BODY_BYTES = 1 << 24  # names and shapes of all tensors of a model
MAX_WAITING_WORK = 64
MAX_REQUESTS = 64


def create_admin_app(fleet: Fleet, config: ServeConfig, keys: ApiKeys, labels: TenantLabels) -> FastAPI:
    """The routes of docs/admin.md over `fleet`, for whoever has one of `keys`."""
    app = FastAPI(title="Manta, for operators", version=VERSION, redoc_url=None, docs_url=None)
    app.state.work_pool = WorkPool(1, MAX_WAITING_WORK, MAX_WAITING_WORK)
    app.state.process_pool = app.state.work_pool
    app.state.max_json_depth = config.ingress.limits.max_json_depth
    install_error_handlers(app)
    app.add_api_route("/health", _health, methods=["GET"], tags=["service"])
    join_routes(
        app,
        *(routes(fleet) for routes in (engine_routes, weight_routes, replica_routes)),
        adapter_routes(fleet, config.admin.adapter_roots),
        profile_routes(fleet, config.ingress),
        server_info_routes(config),
        tenant_routes(labels),
    )
    add_body_schemas(app, *BODIES)
    limits, held = config.ingress.limits, HeldBytes(4 * MAX_BODY_BYTES)
    times = BodyTimes(limits.max_body_s, limits.max_body_gap_s)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, times=times, held=held)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(HeaderLimit, limits=config.ingress.limits)
    app.add_middleware(RequestLimit, max_requests=MAX_REQUESTS)
    app.add_middleware(RequestContext)
    return app


async def _health() -> JSONResponse:
    """200 while the listener answers."""
    return JSONResponse({"status": "ok"})
