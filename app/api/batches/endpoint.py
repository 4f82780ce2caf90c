"""The endpoints of files, uploads and batches: they share a store, and a runner works on what is in it."""

from __future__ import annotations

import uuid

from fastapi import APIRouter

from app.api.batches.batch import BatchBody
from app.api.batches.file_store import FileStore
from app.api.batches.files import file_routes
from app.api.batches.line_room import LineRoom
from app.api.batches.message_batches import MessageBatchBody, MessageBatches, message_batch_routes
from app.api.batches.routes import batch_routes
from app.api.batches.run import Tools
from app.api.batches.runner import BatchRunner
from app.api.batches.turns import Turns
from app.api.batches.upload_routes import MAX_PART_BYTES, PARTS, upload_routes
from app.api.batches.upload_store import CompleteBody, UploadBody, UploadStore
from app.api.batches.uploads import Uploads
from app.api.endpoint import Api, Endpoint
from app.api.http.form import FORM_BYTES
from app.api.http.joined_routes import join_routes
from app.config.limits import RequestLimits


def _routes(api: Api) -> APIRouter:
    """Files and batches, whose requests go to the application's own routes. The runner is left in `api.state`, for who
    starts its watch over batches that other servers left behind."""
    files, batches = FileStore(api.stores("files")), api.stores("batches")
    tools = Tools(
        post=api.post_detached,
        files=files,
        turns=Turns(api.ingress.max_batch_concurrency),
        room=LineRoom(api.limits.max_bodies_bytes),
        pool=api.state.work_pool,
        max_lines=api.ingress.max_batch_requests,
        max_line_bytes=api.limits.max_body_bytes,
        max_depth=api.limits.max_json_depth,
        concurrency=api.ingress.max_batch_concurrency,
        owner=uuid.uuid4().hex,
        lease_s=api.ingress.lease_s,
    )
    api.state.batch_runner = BatchRunner(tools, batches, api.ingress.max_tenant_batches)
    router = APIRouter()
    uploads = Uploads(files, api.limits, api.ingress)
    messages = MessageBatches(api.state.batch_runner, files, batches, api.ingress.max_batch_requests)
    join_routes(
        router,
        file_routes(files, api.limits, uploads),
        upload_routes(UploadStore(files, api.limits), uploads),
        message_batch_routes(messages),
        batch_routes(api.state.batch_runner, files, batches),
    )
    return router


def _bounds(limits: RequestLimits) -> dict[str, int]:
    """Returns how large the bodies of the routes that take files may be."""
    file, part = limits.max_file_bytes, min(limits.max_file_bytes, MAX_PART_BYTES)
    return {"/v1/files": file + FORM_BYTES, PARTS: part + FORM_BYTES}


ENDPOINT = Endpoint(_routes, (BatchBody, MessageBatchBody, UploadBody, CompleteBody), uploads=_bounds)
