"""Sleep, pause and the like of all replicas of a model, under vLLM's names.

The parameter `model` of each names one of several models; without it the first is meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request

from app.api.admin.fleet import TIMEOUT_S, Fleet, answer
from app.api.generation.render import find_model
from app.api.http.json_response import JSONResponse
from app.api.http.query import choice_param, choices_param, no_other_params, text_param

MODES = ("abort", "wait", "keep")  # the first is the default


class _Asked:
    """All replicas of the model that a request names."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def call(self, request: Request, name: str, **arguments: Any) -> JSONResponse:
        """Asks all replicas of the model, and answers with what each says to a control call."""
        model = find_model(self._fleet, text_param(request, "model")).name
        return answer(await self._fleet.control(model, name, arguments, TIMEOUT_S))

    async def states(self, request: Request) -> list[Mapping[str, Any]]:
        """Returns the state of each replica; the first error is raised."""
        no_other_params(request, "model")
        model = find_model(self._fleet, text_param(request, "model")).name
        answers = await self._fleet.control(model, "describe", {}, TIMEOUT_S)
        answer(answers)
        return [one.result for one in answers]


def engine_routes(fleet: Fleet) -> APIRouter:
    """All of them."""
    router, asked = APIRouter(tags=["engines"]), _Asked(fleet)
    _sleep_routes(router, asked)
    _request_routes(router, asked)
    return router


def _sleep_routes(router: APIRouter, asked: _Asked) -> None:
    """POST /sleep, /wake_up; GET /is_sleeping, /is_paused, /get_world_size."""

    @router.post("/sleep")
    async def sleep(request: Request) -> JSONResponse:
        """Give memory back: `level` 1 keeps the weights in host memory, 2 drops them, 0 only pauses; `mode`."""
        no_other_params(request, "model", "level", "mode")
        level, mode = int(choice_param(request, "level", ("1", "0", "2"))), choice_param(request, "mode", MODES)
        if level == 0:
            return await asked.call(request, "pause", mode=mode)
        return await asked.call(request, "sleep", level=level, mode=mode)

    @router.post("/wake_up")
    async def wake_up(request: Request) -> JSONResponse:
        """Take the memory again: all, or of `tags` (`weights`, `kv_cache`) those that are given."""
        no_other_params(request, "model", "tags")
        return await asked.call(request, "wake_up", tags=choices_param(request, "tags", ("weights", "kv_cache")))

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request) -> JSONResponse:
        """Answers whether a replica sleeps."""
        return JSONResponse({"is_sleeping": any(state["sleep_level"] for state in await asked.states(request))})

    @router.get("/is_paused")
    async def is_paused(request: Request) -> JSONResponse:
        """Answers whether a replica is paused, asleep or changes its weights."""
        return JSONResponse({"is_paused": any(state["is_paused"] for state in await asked.states(request))})

    @router.get("/get_world_size")
    async def get_world_size(request: Request) -> JSONResponse:
        """Workers of all replicas together."""
        return JSONResponse({"world_size": sum(state["world_size"] for state in await asked.states(request))})


def _request_routes(router: APIRouter, asked: _Asked) -> None:
    """POST /pause, /resume, /abort_requests, /reset_prefix_cache."""

    @router.post("/pause")
    async def pause(request: Request) -> JSONResponse:
        """Compute nothing more, new requests wait; `mode`; `clear_cache` (true) forgets the prefix caches."""
        no_other_params(request, "model", "mode", "clear_cache")
        clear_cache = choice_param(request, "clear_cache", ("true", "false")) == "true"
        return await asked.call(request, "pause", mode=choice_param(request, "mode", MODES), clear_cache=clear_cache)

    @router.post("/resume")
    async def resume(request: Request) -> JSONResponse:
        """Go on after /pause."""
        no_other_params(request, "model")
        return await asked.call(request, "resume")

    @router.post("/abort_requests")
    async def abort_requests(request: Request) -> JSONResponse:
        """End all requests, with an error that says so; how many."""
        no_other_params(request, "model")
        return await asked.call(request, "abort_requests")

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> JSONResponse:
        """Forget all prefixes: on devices, in host memory and, by the engines' events, in the Routers."""
        no_other_params(request, "model")
        return await asked.call(request, "reset_prefix_cache")
