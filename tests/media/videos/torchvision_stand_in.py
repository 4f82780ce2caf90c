"""transformers' classes of videos, which want torchvision, without it: what they call of it is not called here."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest


def video_processor(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of them, by its family and name."""
    importlib.import_module("transformers.video_processing_utils")  # which looks for the real torchvision
    for part in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        monkeypatch.setitem(sys.modules, part, ModuleType(part))
    functional = "torchvision.transforms.v2.functional"
    monkeypatch.setitem(sys.modules, functional, ModuleType(functional))
    sys.modules["torchvision.transforms.v2"].functional = sys.modules[functional]  # type: ignore[attr-defined]
    module = importlib.import_module(f"transformers.models.{family}.video_processing_{family}")
    return module.__dict__[name]
