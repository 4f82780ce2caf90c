"""The description that an endpoint gives of itself: its routes, the bodies they read, and whether a server opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.datastructures import State

from app.api.engine_client import EngineClient
from app.api.http.in_process import Post
from app.api.http.live_sockets import MakeSession
from app.api.store.kinds import Stores
from app.config.ingress import IngressConfig
from app.config.limits import RequestLimits


@dataclass(frozen=True, slots=True)
class Api:
    """Holds what the endpoints of one application are made of."""

    client: EngineClient
    limits: RequestLimits  # bound what one request may ask for
    ingress: IngressConfig
    stores: Stores  # what clients leave here
    post: Post  # to the application's own routes
    post_detached: Post  # the same where nobody waits for the answer
    state: State  # the application's: its pools, and what outlives a request


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One line of the table in app/api/endpoints.py points at one of these."""

    routes: Callable[[Api], APIRouter]
    bodies: tuple[type[BaseModel], ...] = ()  # read by hand (app/api/http/body.py), so their schemas must be told
    is_open: Callable[[IngressConfig], bool] = lambda ingress: True
    generating: tuple[str, ...] = ()  # paths whose answers take long and cost much: they heed Idempotency-Key
    sockets: tuple[str, ...] = ()  # paths that clients may open websockets on (app/api/http/sockets.py)
    live: Mapping[str, MakeSession] = field(default_factory=dict)  # the same of sessions (app/api/http/live_sockets.py)
    # Paths of routes whose bodies may be larger than `max_body_bytes`, with their limits.
    uploads: Callable[[RequestLimits], Mapping[str, int]] = lambda limits: {}
