"""The fields of generation_config.json that requests take for their defaults. No torch (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from app.checkpoints.fields.kinds import check, whole
from app.checkpoints.model_info import SAMPLING_DEFAULTS
from app.errors import CheckpointError
from app.records.sampling_params import SamplingParams

# Ranges of sampling defaults are those of SamplingParams.
_FIELDS = {"max_new_tokens": whole(1, 1 << 30)}


def check_generation(generation: Mapping[str, Any], file: str) -> None:
    """CheckpointError names a default that is of another type, or that every request would be refused for."""
    check(generation, _FIELDS, file)
    own = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    try:
        SamplingParams.model_validate(own, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        what = f"{name} is {own[name]!r:.80}: {first['msg']}"
        raise CheckpointError(f"{file} is not usable: {what}; correct it or leave it out", param="model") from None
