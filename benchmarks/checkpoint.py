"""Writes a checkpoint of random weights in the shape of a model, in files as a hub has them.

python -m benchmarks.checkpoint --shape llama-8b DIRECTORY [--format safetensors|pt]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.weight_files import NAMED_FILES
from app.distributed.parallel_groups import ParallelGroups
from app.layers.context import BuildContext
from app.layers.weight import ShapeMismatch, Weight
from app.loading.load_formats.base import targets
from app.models import MODELS
from app.worker.attention.backend import select_attention
from benchmarks.shapes import SHAPES, write_shape

FILE_BYTES = 5 << 30
CPU = torch.device("cpu")


def write_checkpoint(shape: str, folder: Path, form: str = "safetensors", device: str = "cpu") -> Path:
    """The directory `folder/shape`, with weights drawn on `device`."""
    directory = write_shape(shape, folder)
    info = ModelInfo.from_directory(str(directory))
    single, index = NAMED_FILES[form]
    stem, suffix = single.rsplit(".", 1)
    places: dict[str, str] = {}
    for number, names in enumerate(_files(_shapes(info))):
        file = f"{stem}-{number:05d}.{suffix}"
        tensors = {
            name: torch.randn(size, dtype=torch.bfloat16, device=device).mul_(0.02).cpu() for name, size in names
        }
        save_file(tensors, directory / file) if form == "safetensors" else torch.save(tensors, directory / file)
        places |= dict.fromkeys(tensors, file)
    (directory / index).write_text(json.dumps({"weight_map": places}))
    return directory


class _Asked:
    """A tensor of any shape, which remembers what shape it should have had."""

    shape: tuple[int, ...] = (-1,)

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        raise AssertionError("no shape is like this one")

    def read_into(self, target: torch.Tensor, dim: int = 0, start: int = 0) -> None:
        raise AssertionError("no shape is like this one")


def _shapes(info: ModelInfo) -> list[tuple[str, list[int]]]:
    """Names and shapes that the model wants, in its own order."""
    ctx = BuildContext(torch.bfloat16, CPU, 64, select_attention("torch", CPU)[0], ParallelGroups())
    with torch.device("meta"):
        model = MODELS.load(info.architecture)(ctx, info)
    return [(name, _shape(weight, part)) for name, (weight, part) in targets(model).items()]


def _shape(weight: Weight, part: str) -> list[int]:
    try:
        weight.weight_loader(_Asked(), part)
    except ShapeMismatch as error:
        shape: list[int] = json.loads(str(error).partition("expects ")[2])
        return shape
    raise AssertionError("a parameter that takes any shape")


def _files(shapes: list[tuple[str, list[int]]]) -> Iterator[list[tuple[str, list[int]]]]:
    file: list[tuple[str, list[int]]] = []
    size = 0
    for name, shape in shapes:
        nbytes = 2 * torch.Size(shape).numel()
        if file and size + nbytes > FILE_BYTES:
            yield file
            file, size = [], 0
        file.append((name, shape))
        size += nbytes
    yield file


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--format", choices=sorted(NAMED_FILES), default="safetensors")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(write_checkpoint(args.shape, args.folder, args.format, device))


if __name__ == "__main__":
    main()
