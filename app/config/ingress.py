"""The options of the HTTP front: the section `ingress` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.config.frozen import Frozen
from app.config.limits import RequestLimits
from app.config.media import MediaConfig

# Environment variables for what does not belong in a file: API keys, separated by commas or spaces; a file of keys.
KEYS_VARIABLE = "MANTA_API_KEYS"


KEYS_FILE_VARIABLE = "MANTA_API_KEYS_FILE"


# What each ingress replica allows, so that several allow as many times as much.
PER_INGRESS = frozenset(
    {
        "cache_bytes",
        "decode_memory_bytes",
        "max_background_responses",
        "max_batch_concurrency",
        "max_bodies_bytes",
        "max_decoders",
        "max_sockets",
        "max_tenant_background_responses",
        "max_tenant_sockets",
        "max_waiting_requests",
    }
)


class IngressConfig(Frozen):
    """The HTTP front: dialects, text, streams."""

    num_replicas: int | None = Field(
        None,
        ge=1,
        description="Ingress replicas; two survive the loss of one. By default one; where models run on GPUs, and "
        "none of `num_cpus`, the bounds per ingress replica and a tenant's `max_requests` is set, one for every four "
        "cores of a node, at most four.",
    )
    num_cpus: float = Field(0.0, ge=0, description="Ray CPUs reserved for each replica.")
    route_timeout_s: float = Field(
        0.05,
        gt=0,
        description="Least time the Router has to answer before the ingress chooses; up to eight times as much where "
        "its answers have taken longer of late, as on a busy machine.",
    )
    credit_window_tokens: int = Field(
        512, ge=1, description="Tokens of one request that may wait for a slow client before the engine holds it."
    )
    lease_s: float = Field(8.0, gt=0, description="An engine aborts the requests of an ingress silent for so long.")
    move_after_s: float = Field(
        5.0, ge=0, description="What runs longer on a replica that is taken out of service goes on at another one."
    )
    graceful_shutdown_timeout_s: float = Field(
        600.0, ge=0, description="Time an ingress replica that is taken out of service has for its streams to end."
    )
    channel: Literal["direct", "serve"] = Field(
        "direct",
        description="How requests reach the engine replicas and tokens come back: over connections of the "
        "ingress' own, or over Serve's handles, as also where no connection can be had.",
    )
    access_log: bool = Field(True, description="Write a line for each request; faults are logged in any case.")
    admin: bool = Field(False, description="Open the administrator's routes (/debug/..., /server_info).")
    profile_directory: str | None = Field(
        None,
        description="Folder on the engines' nodes that /start_profile and /memory_snapshot write into; they are routes "
        "of the administrator, and refused where this is not set.",
    )
    tokenizer_info: bool = Field(False, description="Open /tokenizer_info: tokenizer_config.json and chat template.")
    api_keys_file: str | None = Field(
        None,
        description="File of API keys, one a line: `key`, `sha256:<hex>`, each with an optional `tenant=` in front. "
        "The environment (MANTA_API_KEYS, MANTA_API_KEYS_FILE) may name further ones; without any the server is open.",
    )
    api_key_hashes: tuple[str, ...] = Field(
        (), description="API keys as `sha256:<hex>`, with an optional `tenant=` in front; never the keys themselves."
    )
    cors_origins: tuple[str, ...] = Field((), description="Origins whose pages may call the API; `*` means any.")
    sse_keep_alive_s: float = Field(15.0, gt=0, description="A stream that is silent for so long sends a comment.")
    max_stored_responses: int = Field(
        10_000, ge=0, description="Responses and chat completions kept for later (`store`); 0 keeps none."
    )
    work_threads: int = Field(
        0, ge=0, description="Threads that tokenise, render templates and parse; 0: as many as cores, from 2 to 8."
    )
    max_waiting_work: int = Field(
        4096, ge=1, description="Pieces of such work that may wait for a thread; beyond them there is a 429."
    )
    max_waiting_work_per_tenant: int = Field(
        2048, ge=1, description="How many of those may be one tenant's; tenants take turns."
    )
    max_stored_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Memory for kept responses and chats, in bytes. When it is full, the tenant that holds most loses "
        "what it has not used for longest.",
    )
    idempotency_s: float = Field(
        600.0, gt=0, description="An answer is kept so long for requests that come again with its Idempotency-Key."
    )
    max_kept_answers: int = Field(10_000, ge=0, description="Answers kept for that; 0 refuses such keys.")
    max_kept_answer_bytes: int = Field(
        256 << 20, ge=0, description="Memory for them, in bytes; whose are forgotten first is as for kept responses."
    )
    max_tenant_running_keys: int = Field(256, ge=1, description="Requests with such a key under way of one tenant.")
    max_background_responses: int = Field(256, ge=0, description="Background responses under way per ingress replica.")
    max_tenant_background_responses: int = Field(64, ge=0, description="The same of one tenant.")
    max_sockets: int = Field(1024, ge=0, description="Websockets open per ingress replica; 0 opens none.")
    max_tenant_sockets: int = Field(256, ge=0, description="The same of one tenant.")
    socket_idle_s: float = Field(
        600.0, gt=0, description="A websocket is closed on which nothing is asked or answered for so long."
    )
    max_socket_s: float = Field(3600.0, gt=0, description="Longest life of a websocket; the answer under way ends.")
    max_file_store_bytes: int = Field(
        1 << 30, ge=0, description="Memory for the files of /v1/files and the results of batches, in bytes."
    )
    max_tenant_file_store_bytes: int = Field(256 << 20, ge=0, description="The same of one tenant.")
    max_files: int = Field(8192, ge=0, description="Files that are kept; 0 keeps none.")
    max_tenant_files: int = Field(1024, ge=0, description="The same of one tenant.")
    max_batch_concurrency: int = Field(
        32, ge=1, description="Requests of batches under way per ingress replica; tenants share them."
    )
    max_tenant_batches: int = Field(16, ge=0, description="Batches under way of one tenant.")
    max_batch_requests: int = Field(50_000, ge=1, description="Most requests in one batch.")
    limits: RequestLimits = RequestLimits()
    media: MediaConfig = MediaConfig()

    @property
    def is_bounded(self) -> bool:
        """True if the operator has set a bound that each ingress replica has for itself."""
        given = self.model_fields_set | self.limits.model_fields_set | self.media.model_fields_set
        return bool(PER_INGRESS & given)
