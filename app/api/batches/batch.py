"""A batch as OpenAI shows it, and what else is known of it."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field

from app.api.strict_models import StrictModel
from app.bounds import Metadata

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
RUNNING = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
MAX_ERRORS = 100


class OutputExpiresAfter(StrictModel):
    """When the files that a batch writes are forgotten."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2592000)


class BatchBody(StrictModel):
    """Body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=256, description="A file of /v1/files, one request a line.")
    endpoint: Endpoint = Field(description="The route of all its requests.")
    completion_window: str = Field(
        pattern=r"^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$",
        description="How long the batch may take, from 1h to 168h; OpenAI's is 24h.",
    )
    metadata: Metadata | None = Field(None, description="Kept with the batch.")
    output_expires_after: OutputExpiresAfter | None = Field(
        None, description="When output and errors are forgotten; after 30 days when not given."
    )


@dataclass(slots=True)
class Batch:
    """One batch. `shown` is OpenAI's object; `output` and `errors` are the files it writes, from its beginning."""

    shown: dict[str, Any]
    output: str = ""
    errors: str = ""
    output_expires_s: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})

    @classmethod
    def new(cls, body: BatchBody) -> Self:
        """A batch that has not begun."""
        now = int(time.time())
        shown: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
        }
        shown |= {"input_file_id": body.input_file_id, "completion_window": body.completion_window}
        shown |= {"status": "validating", "output_file_id": None, "error_file_id": None, "created_at": now}
        shown |= {"expires_at": now + 3600 * int(body.completion_window[:-1]), "metadata": body.metadata}
        after = body.output_expires_after
        return cls(shown, output_expires_s=after.seconds if after is not None else None)

    @classmethod
    def load(cls, header: bytes) -> Self:
        """A batch from its entry's header."""
        return cls(**json.loads(header))

    @property
    def id(self) -> str:
        """The batch's id."""
        return str(self.shown["id"])

    @property
    def status(self) -> str:
        """The batch's status."""
        return str(self.shown["status"])

    def dump(self) -> bytes:
        """The header of its entry."""
        fields = {"shown": self.shown, "output": self.output, "errors": self.errors, "counts": self.counts}
        return json.dumps(fields | {"output_expires_s": self.output_expires_s}).encode()

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object."""
        return self.shown | {"request_counts": self.counts}

    def becomes(self, status: str) -> None:
        """Go on to `status`, and note when."""
        self.shown |= {"status": status, f"{status}_at": int(time.time())}

    def fails(self, errors: list[dict[str, Any]]) -> None:
        """End the batch without results."""
        self.shown["errors"] = {"object": "list", "data": errors[:MAX_ERRORS]}
        self.becomes("failed")
