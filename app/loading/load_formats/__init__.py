"""Brings weights into a model, by the names of `load_format`: one file and one line (app/backends.py) each."""

from __future__ import annotations

from pathlib import Path

from app.backends import LOAD_FORMATS
from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import DirectReader
from app.checkpoints.weight_files import format_of
from app.errors import CheckpointError
from app.loading.load_formats.base import NamedTensors


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a directory, whatever its format; each is read when it is asked for. CheckpointError names an
    unusable file."""
    name = format_of(directory, "auto")
    form = LOAD_FORMATS.load(name)()
    if not isinstance(form, NamedTensors):
        raise CheckpointError(f"{directory}: {name} does not hold tensors under their family's names", param="model")
    return form.tensors(directory, DirectReader())
