"""The operator's listener: the section `admin` of the configuration (docs/admin.md)."""

from __future__ import annotations

from pydantic import Field

from app.config.frozen import Frozen

# Environment variables, as for API keys: keys, separated by commas or spaces; a file of keys.
ADMIN_KEYS_VARIABLE = "MANTA_ADMIN_KEYS"
ADMIN_KEYS_FILE_VARIABLE = "MANTA_ADMIN_KEYS_FILE"


class AdminConfig(Frozen):
    """Sleep, pause, new weights and the like over HTTP, at a port and with keys of their own."""

    port: int | None = Field(None, ge=1, le=65535, description="TCP port of the listener; where it is not set is none.")
    host: str = Field(
        "127.0.0.1", min_length=1, description="Address it is bound to, on the node of Ray's head: there is one of it."
    )
    keys_file: str | None = Field(
        None,
        description="File of the operators' keys on that node, in the form of `ingress.api_keys_file`; the environment "
        "(MANTA_ADMIN_KEYS, MANTA_ADMIN_KEYS_FILE) may name further ones. Without any it does not start.",
    )

    adapter_roots: tuple[str, ...] = Field(
        (),
        description="Directories that adapters may be loaded from by /v1/load_lora_adapter, links followed. When not "
        "given, none may.",
    )

    transfer_idle_s: float = Field(
        300.0,
        gt=0,
        description="Weights from another process, begun and not finished, are taken back when none of their calls has "
        "come for so long: until then requests wait.",
    )

    held_wait_s: float = Field(
        60.0,
        ge=0,
        description="A request that comes while all replicas of its model are held (paused, or in the midst of an "
        "update of their weights) waits so long at most; then it is a 503 `engine_held` that may be sent again.",
    )

    @property
    def is_open(self) -> bool:
        """True if there is a listener."""
        return self.port is not None
