"""A batch as OpenAI shows it, and what else is known of it."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from pydantic import Field

from app.api.batches.file_store import ExpiresAfter
from app.api.http.strict_models import StrictModel
from app.bounds import Metadata

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
RUNNING = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
MAX_ERRORS = 100


class BatchBody(StrictModel):
    """Body of POST /v1/batches."""

    input_file_id: str = Field(min_length=1, max_length=256, description="A file of /v1/files, one request a line.")
    endpoint: Endpoint = Field(description="The route of all its requests.")
    completion_window: str = Field(
        pattern=r"^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$",
        description="How long the batch may take, from 1h to 168h; OpenAI's is 24h.",
    )
    metadata: Metadata | None = Field(None, description="Kept with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When output and errors are forgotten; after 30 days when not given."
    )


@dataclass(slots=True)
class Batch:
    """One batch. `shown` is OpenAI's object; `output` and `errors` are the files it writes, from its beginning."""

    shown: dict[str, Any]
    output: str = ""
    errors: str = ""
    output_expires_s: int | None = None
    num_expired: int = 0  # of those that failed: the window closed before they were answered
    counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})
    num_takeovers: int = 0  # since a line was answered
    num_done_before: int = 0  # lines, when it was taken over last

    @classmethod
    def new(cls, body: BatchBody) -> Self:
        """A batch that has not begun."""
        batch = cls.made("batch", body.input_file_id, body.endpoint, int(body.completion_window[:-1]), body.metadata)
        after = body.output_expires_after
        batch.output_expires_s = after.seconds if after is not None else None
        return batch

    @classmethod
    def made(
        cls, prefix: str, input_file_id: str, endpoint: str, window_h: int, metadata: dict[str, str] | None = None
    ) -> Self:
        """A batch that has not begun, whose id begins with `prefix`."""
        now = int(time.time())
        shown: dict[str, Any] = {"id": f"{prefix}_{uuid.uuid4().hex}", "object": "batch", "endpoint": endpoint}
        shown |= {"errors": None, "input_file_id": input_file_id, "completion_window": f"{window_h}h"}
        shown |= {"status": "validating", "output_file_id": None, "error_file_id": None, "created_at": now}
        return cls(shown | {"expires_at": now + 3600 * window_h, "metadata": metadata})

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
        return json.dumps(dataclasses.asdict(self)).encode()

    def as_json(self) -> dict[str, Any]:
        """OpenAI's object."""
        return self.shown | {"request_counts": self.counts}

    def note_takeover(self) -> None:
        """Note that the server was lost that worked on it."""
        num_done = self.counts["completed"] + self.counts["failed"]
        self.num_takeovers = self.num_takeovers + 1 if num_done == self.num_done_before else 1
        self.num_done_before = num_done

    def becomes(self, status: str) -> None:
        """Go on to `status`, and note when."""
        self.shown |= {"status": status, f"{status}_at": int(time.time())}

    def fails(self, errors: list[dict[str, Any]]) -> None:
        """End the batch without results."""
        self.shown["errors"] = {"object": "list", "data": errors[:MAX_ERRORS]}
        self.becomes("failed")
