"""The parts of a configuration that are Serve's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from app.errors import ConfigError
from app.registry import suggestion


def check_schema(document: dict[str, Any], file: Path) -> None:
    """The parts of a file that belong to Serve, which itself would pass over a key that it does not know. ConfigError:
    what is wrong. Imports Serve, which takes a second or two."""
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    applications = document["applications"]
    parts = [(document, ServeDeploySchema, "")]
    parts += [(each, ServeApplicationSchema, f"applications.{i}.") for i, each in enumerate(applications)]
    for part, schema, place in parts:
        for key in part.keys() - schema.model_fields.keys():
            hint = suggestion(str(key), schema.model_fields)
            raise ConfigError(f"{file}: {place}{key}: no such option of Serve; {hint}")
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        details = error.errors(include_url=False)
        lines = [f"{file}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details]
        raise ConfigError("\n".join(lines)) from None
