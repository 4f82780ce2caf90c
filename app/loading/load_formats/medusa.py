"""The file in which the authors of Medusa publish heads: `medusa_lm_head.pt` or `.safetensors`, and no others."""

from __future__ import annotations

from pathlib import Path

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.checkpoints.tensors.reader import Reader
from app.loading.load_formats.base import NamedTensors
from app.loading.load_formats.pt import open_file
from app.loading.load_formats.safetensors import open_files

NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


class MedusaFile(NamedTensors):
    """The tensors of that file, by the names that it has for them."""

    def tensors(self, directory: Path, reader: Reader) -> dict[str, StoredTensor]:
        """See NamedTensors."""
        file = next(directory / name for name in NAMES if (directory / name).is_file())
        return open_files([file], reader) if file.suffix == ".safetensors" else open_file(file, reader)


def has_medusa_file(directory: Path) -> bool:
    """True if there is one."""
    return any((directory / name).is_file() for name in NAMES)
