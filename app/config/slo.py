"""Service level objectives: the section `slo` of a model."""

from __future__ import annotations

from pydantic import Field

from app.config.frozen import Frozen


class SloConfig(Frozen):
    """Service level objectives of a model's requests: what metrics call attained, and goodput."""

    ttft_s: float = Field(2.0, gt=0, description="Time to the first token, from arrival at the server.")
    itl_s: float = Field(0.1, gt=0, description="Mean time between the tokens of a request, after the first.")
