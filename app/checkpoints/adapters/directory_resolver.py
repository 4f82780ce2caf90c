"""Finds an adapter under its own name: the directories in one directory are the adapters, as in vLLM's
lora_filesystem_resolver."""

from __future__ import annotations

import re
from pathlib import Path

from app.checkpoints.adapters.adapter_config import CONFIG_FILE
from app.checkpoints.adapters.adapter_resolver import AdapterResolver

# One part of a path, which is neither hidden nor a step upwards; file systems take 255 bytes.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,254}")


class DirectoryResolver(AdapterResolver):
    """Looks for directories."""

    def find(self, name: str) -> Path | None:
        """See AdapterResolver."""
        if not _NAME.fullmatch(name):
            return None
        directory = self.root / name
        return directory if (directory / CONFIG_FILE).is_file() else None
