"""Routes that tell the tenant whose series of metrics, spans and lines of the log a label means."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.api.http.json_response import JSONResponse
from app.api.http.query import no_other_params, text_param
from app.errors import InvalidRequestError
from app.telemetry.tenant_tokens import TenantLabels


def tenant_routes(labels: TenantLabels) -> APIRouter:
    """GET /tenant_label."""
    router = APIRouter(tags=["service"])

    @router.get("/tenant_label")
    async def tenant_label(request: Request) -> JSONResponse:
        """The label of the tenant named by `tenant`, in metrics, spans and logs."""
        no_other_params(request, "tenant")
        tenant = text_param(request, "tenant")
        if not tenant:
            raise InvalidRequestError("tenant: name one, as the file of API keys does", param="tenant")
        return JSONResponse({"tenant": tenant, "label": labels.of(tenant)})

    return router
