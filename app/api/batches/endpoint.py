"""The endpoints of files and batches: they share a store, and a runner works on what is in it."""

from __future__ import annotations

import uuid

from fastapi import APIRouter

from app.api.batches.batch import BatchBody
from app.api.batches.file_store import FileStore
from app.api.batches.files import file_routes
from app.api.batches.routes import batch_routes
from app.api.batches.run import Tools
from app.api.batches.runner import BatchRunner
from app.api.batches.turns import Turns
from app.api.batches.uploads import FORM_BYTES
from app.api.endpoint import Api, Endpoint


def _routes(api: Api) -> APIRouter:
    """Files and batches, whose requests go to the application's own routes. The runner is left in `api.state`, for who
    starts its watch over batches that other servers left behind."""
    files, batches = FileStore(api.stores("files")), api.stores("batches")
    tools = Tools(
        post=api.post_detached,
        files=files,
        turns=Turns(api.ingress.max_batch_concurrency),
        pool=api.state.work_pool,
        max_lines=api.ingress.max_batch_requests,
        max_line_bytes=api.limits.max_body_bytes,
        concurrency=api.ingress.max_batch_concurrency,
        owner=uuid.uuid4().hex,
        lease_s=api.ingress.lease_s,
    )
    api.state.batch_runner = BatchRunner(tools, batches, api.ingress.max_tenant_batches)
    router = APIRouter()
    router.include_router(file_routes(files, api.limits, api.ingress))
    router.include_router(batch_routes(api.state.batch_runner, files, batches))
    return router


ENDPOINT = Endpoint(_routes, (BatchBody,), uploads=lambda limits: {"/v1/files": limits.max_file_bytes + FORM_BYTES})
