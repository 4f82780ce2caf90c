"""Writes a checkpoint tensor by tensor, in files of bounded size.

All goes into `NAME.partial` beside the output, which gets its name when it is complete: its config.json is written last
and no run that was interrupted leaves a directory that could be taken for a model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from app.checkpoints.weight_files import GGUF_MANIFEST, NAMED_FILES
from app.errors import ConfigError
from app.worker.save_sharded import WEIGHTS

SINGLE, INDEX = NAMED_FILES["safetensors"]
_NOT_COPIED = {"config.json", GGUF_MANIFEST}  # besides weights: what is written anew, and what says where others lie


class CheckpointWriter:
    """One directory. Tensors are kept until they fill a file of `shard_bytes`."""

    def __init__(self, output: Path, shard_bytes: int) -> None:
        """ConfigError where `output` is taken, or what an interrupted run left lies in the way."""
        self.output = _free(output)
        self.partial = self.output.with_name(self.output.name + ".partial")
        try:
            self.partial.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"OUTPUT: {self.partial} is left of an interrupted run, or being written: remove it"
            ) from None
        except OSError as error:
            raise ConfigError(f"OUTPUT: cannot make {self.partial}: {error.strerror}") from None
        self._shard_bytes = shard_bytes
        self._kept: dict[str, torch.Tensor] = {}
        self._places: dict[str, int] = {}  # the file of each tensor that was written
        self._num_files = 0
        self.num_bytes = 0  # of all tensors

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor, now or with the next ones."""
        tensor = tensor.contiguous().cpu()
        if self._kept and sum(kept.nbytes for kept in self._kept.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._kept[name] = tensor
        self.num_bytes += tensor.nbytes

    def finish(self, source: Path, config: dict[str, Any]) -> None:
        """Write what is left, the other files of `source`, and at last config.json."""
        self._flush()
        names = self._named()
        if len(names) > 1:
            index = {
                "metadata": {"total_size": self.num_bytes},
                "weight_map": {name: names[number] for name, number in self._places.items()},
            }
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        left_out = WEIGHTS(str(source), [file.name for file in source.iterdir()]) | _NOT_COPIED
        for file in source.iterdir():
            if file.is_file() and file.name not in left_out:
                shutil.copyfile(file, self.partial / file.name)
        (self.partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def publish(self) -> None:
        """Give the directory its name. ConfigError says where it lies if that cannot be."""
        try:
            self.partial.replace(self.output)
        except OSError as error:
            raise ConfigError(
                f"OUTPUT: the checkpoint is complete in {self.partial}, but cannot be moved to {self.output}: "
                f"{error.strerror}"
            ) from error

    def abandon(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _flush(self) -> None:
        if not self._kept:
            return
        file = self.partial / f"{self._num_files}.safetensors"
        save_file(self._kept, file, {"format": "pt"})
        file.chmod(0o644)  # the library makes them for their owner alone
        self._places |= dict.fromkeys(self._kept, self._num_files)
        self._num_files += 1
        self._kept = {}

    def _named(self) -> list[str]:
        """The files' names, which say how many there are."""
        count = self._num_files
        names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        for number, name in enumerate(names):
            (self.partial / f"{number}.safetensors").rename(self.partial / name)
        return names


def _free(output: Path) -> Path:
    """The place of a directory to be made, behind links. ConfigError where something else is."""
    try:
        place = output.expanduser().resolve()
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError(f"OUTPUT: {output} is not empty: name a new directory")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, or no such user
        raise ConfigError(f"OUTPUT: cannot use {output}: {error}") from None
    if place.is_mount():
        raise ConfigError(f"OUTPUT: {output} is where something is mounted: name a new directory in it")
    return place
