"""The HTTP application: every dialect over one EngineClient."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import WebSocketRoute

from app.api.endpoint import Api
from app.api.endpoints import bodies, endpoints
from app.api.engine_client import EngineClient
from app.api.http.auth import ApiKeys, Authentication
from app.api.http.body import add_body_schemas
from app.api.http.errors import install_error_handlers
from app.api.http.field_rule import FieldRule
from app.api.http.held_bytes import HeldBytes
from app.api.http.in_process import Answer, Post, post_in_process
from app.api.http.joined_routes import hasten, join_routes
from app.api.http.live_sockets import MakeSession
from app.api.http.load_header import LoadHeader
from app.api.http.middleware import BodyLimit, BodyTimes, HeaderLimit, RequestContext
from app.api.http.service_terms import DETACHED, ServiceTerms
from app.api.http.sockets import OpenSockets, SocketEndpoint
from app.api.http.work_pool import WorkPool
from app.api.idempotency.middleware import Idempotency
from app.api.store.kinds import Stores, local_stores
from app.config.admission import AdmissionConfig
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits
from app.version import VERSION

_DEFAULTS = IngressConfig()
_ADMISSION = AdmissionConfig()
MAX_PROCESSES = 4  # at a time, each for one request's own chat template
_ABOUT = """
OpenAI's dialect, with vLLM's extension fields. Where a request leaves `temperature`, `top_p`, `top_k`, `min_p` or
`repetition_penalty` open, the model's own `generation_config.json` decides, then OpenAI's defaults. Without
`max_tokens` a chat may use all the room that the model's context has left; a completion gets 16 tokens, as at OpenAI.
Unknown fields are refused by name, but for those of the routes that agents use (`limits.unknown_fields`).
"""


def create_app(
    client: EngineClient,
    limits: RequestLimits,
    ingress: IngressConfig = _DEFAULTS,
    keys: ApiKeys | None = None,
    stores: Stores | None = None,
    admission: AdmissionConfig = _ADMISSION,
) -> FastAPI:
    """The application over `client`; `limits` bound what one request may ask for, `ingress` says who may ask what.

    `keys` are the configuration's unless given; ConfigError when they cannot be read. `stores` keep what clients leave
    here, in this process unless given; `admission` says on which terms tenants are served.
    """
    app = FastAPI(title="Manta", version=VERSION, description=_ABOUT, redoc_url=None, docs_url=None)
    app.state.sse_keep_alive_s = ingress.sse_keep_alive_s
    app.state.has_access_log = ingress.access_log
    app.state.service_terms = ServiceTerms(admission)
    app.state.max_json_depth = limits.max_json_depth
    app.state.field_rule = FieldRule(limits.unknown_fields)
    waiting = ingress.max_waiting_work, ingress.max_waiting_work_per_tenant
    app.state.work_pool = WorkPool(ingress.work_threads, *waiting)
    app.state.process_pool = WorkPool(MAX_PROCESSES, *waiting)
    install_error_handlers(app)
    posts = _own_routes(app), _own_routes(app, is_detached=True)
    api = Api(client, limits, ingress, stores or local_stores(ingress), *posts, app.state)
    for endpoint in endpoints():
        if endpoint.is_open(ingress):
            join_routes(app, endpoint.routes(api))
    hasten(app)
    add_body_schemas(app, *bodies())
    app.add_middleware(Idempotency, paths=_generating(), store=api.stores("answers"), ingress=ingress)
    app.add_middleware(LoadHeader, paths=_generating())
    _guard(app, limits, ingress, keys or ApiKeys.load(ingress))
    _add_sockets(app, limits, ingress)
    return app


def _own_routes(app: FastAPI, *, is_detached: bool = False) -> Post:
    """Posts to the app's own routes, in the name of a tenant that has been let in."""
    routes = RequestContext(
        ExceptionMiddleware(AsyncExitStackMiddleware(app.router), app.exception_handlers), is_counted=False
    )

    async def post(path: str, payload: bytes, tenant: str) -> Answer:
        scope = {"app": app, "state": {"tenant": tenant, DETACHED: is_detached}}
        holding = app.state.held.begin(scope, tenant)  # of its pictures: whoever posts counts the body
        try:
            return await post_in_process(routes, path, payload, scope)
        finally:
            holding.release()

    return post


def _generating() -> list[str]:
    """The paths of all endpoints that generate."""
    return [path for endpoint in endpoints() for path in endpoint.generating]


def _guard(app: FastAPI, limits: RequestLimits, ingress: IngressConfig, keys: ApiKeys) -> None:
    """Adds what a request passes before a route. The last one added is the outermost: a refusal too has its request id
    and its line in the log, and a page of an allowed origin may read it."""
    app.state.held = held = HeldBytes(limits.max_bodies_bytes)
    uploads = {path: most for endpoint in endpoints() for path, most in endpoint.uploads(limits).items()}
    times = BodyTimes(limits.max_body_s, limits.max_body_gap_s)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes, times=times, held=held, larger=uploads)
    app.add_middleware(Authentication, keys=keys)
    if ingress.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=ingress.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-manta-replica", "retry-after", "retry-after-ms", "idempotent-replayed"],
        )
    app.add_middleware(HeaderLimit, limits=limits)
    app.add_middleware(RequestContext)


def _add_sockets(app: FastAPI, limits: RequestLimits, ingress: IngressConfig) -> None:
    app.state.sockets = opened = OpenSockets(ingress)
    makers: dict[str, MakeSession | None] = {path: None for endpoint in endpoints() for path in endpoint.sockets}
    makers |= {path: make for endpoint in endpoints() for path, make in endpoint.live.items()}
    for path, make in makers.items():
        app.router.routes.append(WebSocketRoute(path, SocketEndpoint(app.state.held, opened, limits, ingress, make)))
