"""The contract of what finds adapters by names that nobody has served yet. No torch (I8)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.config.model import ModelConfig


class AdapterResolver(ABC):
    """Finds adapters of one model. Each ingress replica has one, and asks it on a thread of its own, one name at a
    time."""

    def __init__(self, root: Path) -> None:
        """`root`: the directory that all adapters it finds lie under (`adapter_directory`)."""
        self.root = root

    @classmethod
    def of(cls, config: ModelConfig) -> AdapterResolver:
        """Makes that of a model, which has an `adapter_directory`."""
        return cls(Path(config.adapter_directory or ""))

    @abstractmethod
    def find(self, name: str) -> Path | None:
        """Returns the adapter's directory, which every node has; None: no adapter has this name. `name` is what a
        client wrote as `model`, of 256 characters at most: nothing else about it is known. What is raised is logged,
        and the client is told that the adapter cannot be loaded."""
