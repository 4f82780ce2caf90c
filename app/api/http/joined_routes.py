"""Puts the routes of an application together."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI


def join_routes(into: FastAPI | APIRouter, *routers: APIRouter) -> None:
    """Adds the routers' routes as they stand. FastAPI's `include_router` makes each of them another time, for prefixes,
    dependencies and defaults of who includes them, which nobody here has: half of what an application takes to make."""
    for router in routers:
        into.routes.extend(router.routes)
