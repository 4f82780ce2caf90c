"""An adapter of a team, `team:name`, lies in the team's directory."""

from __future__ import annotations

from pathlib import Path

from app.checkpoints.adapters.adapter_resolver import AdapterResolver
from app.checkpoints.adapters.directory_resolver import DirectoryResolver


class TeamAdapters(AdapterResolver):
    """Splits the name, and looks for each part as for a directory of adapters."""

    def find(self, name: str) -> Path | None:
        """See AdapterResolver."""
        team, _, own = name.partition(":")
        if not team.isidentifier():
            return None
        return DirectoryResolver(self.root / team).find(own)
