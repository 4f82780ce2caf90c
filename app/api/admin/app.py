"""The HTTP application of the operator's listener. Every route but /health asks for an operator's key."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.responses import JSONResponse

from app.api.admin.engine_routes import engine_routes
from app.api.admin.fleet import Fleet
from app.api.admin.replica_routes import RpcRequest, replica_routes
from app.api.admin.weight_routes import FinishRequest, InitRequest, ReloadRequest, UpdateRequest, weight_routes
from app.api.auth import ApiKeys, Authentication
from app.api.body import add_body_schemas
from app.api.errors import install_error_handlers
from app.api.middleware import BodyLimit, HeaderLimit, RequestContext, RequestLimit
from app.api.profile import profile_routes
from app.api.server_info import server_info_routes
from app.api.version import VERSION
from app.api.work_pool import WorkPool
from app.config import ServeConfig

BODIES = (RpcRequest, UpdateRequest, ReloadRequest, InitRequest, FinishRequest)
MAX_BODY_BYTES = 1 << 24  # names and shapes of all tensors of a model
MAX_WAITING_WORK = 64
MAX_REQUESTS = 64


def create_admin_app(fleet: Fleet, config: ServeConfig, keys: ApiKeys) -> FastAPI:
    """The routes of docs/admin.md over `fleet`, for whoever has one of `keys`."""
    app = FastAPI(title="Manta, for operators", version=VERSION, redoc_url=None, docs_url=None)
    app.state.work_pool = WorkPool(1, MAX_WAITING_WORK, MAX_WAITING_WORK)
    app.state.process_pool = app.state.work_pool
    app.state.max_json_depth = config.ingress.limits.max_json_depth
    install_error_handlers(app)
    app.add_api_route("/health", _health, methods=["GET"], tags=["service"])
    for routes in (engine_routes, weight_routes, replica_routes):
        app.include_router(routes(fleet))
    app.include_router(profile_routes(fleet, config.ingress))
    app.include_router(server_info_routes(config))
    add_body_schemas(app, *BODIES)
    max_s = config.ingress.limits.max_body_s
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, max_s=max_s, max_total_bytes=4 * MAX_BODY_BYTES)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(HeaderLimit, limits=config.ingress.limits)
    app.add_middleware(RequestLimit, max_requests=MAX_REQUESTS)
    app.add_middleware(RequestContext)
    return app


async def _health() -> JSONResponse:
    """200 while the listener answers."""
    return JSONResponse({"status": "ok"})
