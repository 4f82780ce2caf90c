"""A rank's weights: put to sleep, brought back, replaced in place.

Level 1 keeps them in host memory (on a CPU they are there anyway), level 2 drops them. What a model holds besides its
weights, such as tables of angles, stays where it is at both levels. Models beside it (drafters) sleep with it; nobody
replaces their weights, so host memory keeps these at both levels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from app.checkpoints.tensors.checkpoint import StoredTensor
from app.config.engine import EngineConfig
from app.errors import InvalidRequestError
from app.layers.quantized_layer import QuantizedLayer
from app.loading.load_formats import open_checkpoint
from app.loading.load_formats.base import LoadRequest, RankNames
from app.loading.load_formats.dummy import Dummy
from app.loading.loader import format_named, materialize_packed, names_of_other_ranks, pack
from app.loading.weight_update import WeightUpdate, drop_packed
from app.models.base import EngineModel
from app.platforms import platform_of
from app.worker.host_copy import HostCopy, empty, storages
from app.worker.placement import Placement


class Weights:
    """The weights of one model. Callers hold torch.inference_mode() and let no step run meanwhile."""

    def __init__(
        self, model: EngineModel, config: EngineConfig, place: Placement, beside: Sequence[nn.Module] = ()
    ) -> None:
        """`beside`: models that share no weights with `model`."""
        self._model = model
        self._beside = beside
        self._copy_beside: HostCopy | None = None
        self._config = config
        self._place = place
        self._copy: HostCopy | None = None
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []  # what has no memory now, and how much it had
        self._update: WeightUpdate | None = None
        self._whole = False
        self._has_contents = True

    @cached_property
    def _elsewhere(self) -> RankNames:
        info = self._place.info
        return names_of_other_ranks(info, self._place.build, format_named(info, self._config.load_format))

    def sleep(self, level: int) -> None:
        """Give the weights' memory back; from level 1 to 2 only the copy."""
        if level == 2:
            self._refuse_streamed("sleep level 2")
        if self._copy is not None and level == 2:
            self._copy.close()
            self._copy = None
            self._has_contents = False
        if self._emptied or (level == 1 and not platform_of(self._place.device).is_async):
            return
        if level == 1:
            held = storages(_tensors(self._model))
            self._copy = HostCopy(held)
        else:
            drop_packed(self._model)
            held = storages(_tensors(self._model))
            self._has_contents = False
        beside = storages(tensor for model in self._beside for tensor in _tensors(model))
        self._copy_beside = HostCopy(beside)
        self._emptied = empty(held)
        empty(beside)

    def _refuse_streamed(self, what: str) -> None:
        if self._model.offload is not None:
            raise InvalidRequestError(f"{what} is not supported with cpu_offload_gb")

    def wake(self) -> bool:
        """Memory for the weights again; whether their contents are there, too. OutOfMemoryError."""
        if self._copy is not None:
            self._copy.restore()
            self._copy.close()
            self._copy = None
        if self._copy_beside is not None:
            self._copy_beside.restore()
            self._copy_beside.close()
            self._copy_beside = None
        for storage, size in self._emptied:
            if storage.nbytes() != size:
                storage.resize_(size)
        self._emptied = []
        return self._has_contents

    def check(self, directory: str) -> None:
        """CheckpointError unless the checkpoint in `directory` could replace the weights."""
        self._refuse_streamed("an update of weights")
        model = self._model
        WeightUpdate(model, self._place.device, self._elsewhere).check(open_checkpoint(Path(directory)))

    def begin(self, *, whole: bool) -> None:
        """From now on `load` replaces weights, until `finish`; `whole`: what there is now are not weights."""
        self._refuse_streamed("an update of weights")
        assert not self._emptied, "the weights are asleep"
        self._whole = whole
        self._update = WeightUpdate(self._model, self._place.device, self._elsewhere)

    def load(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Take in tensors by their names in the checkpoint; CheckpointError names one that does not fit."""
        if self._update is None:
            raise InvalidRequestError("no update has begun")
        self._update.load(tensors)

    def load_directory(self, directory: str) -> None:
        """Take in all of a checkpoint; at random where the engine runs without one."""
        if self._update is None:
            raise InvalidRequestError("no update has begun")
        self._update.forget_kv_scales()
        if directory or self._config.load_format != "dummy":
            self._update.load(open_checkpoint(Path(directory or self._place.info.directory)))
            return
        materialize_packed(self._model, self._place.device)
        info, ctx = self._place.info, self._place.build
        Dummy().fill(self._model, LoadRequest(info.directory, ctx, self._config.seed))
        pack(self._model)
        self._update.note_all_loaded()

    def finish(self, *, whole: bool) -> bool:
        """End the update; whether weights lie elsewhere than before. CheckpointError names what is missing."""
        update, self._update = self._update, None
        if update is None:
            raise InvalidRequestError("no update has begun")
        update.finish(whole=whole or self._whole)
        self._has_contents = True
        return update.replaced_memory


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    """Everything that holds weights: parameters, and what layers keep packed."""
    found = [parameter.data for parameter in model.parameters() if not parameter.is_meta]
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            found += _within(module.made)
    return found


def _within(made: object) -> list[torch.Tensor]:
    """The tensors of something packed, but for those in an order of a library's own."""
    if isinstance(made, torch.Tensor):
        return [] if made.is_mkldnn else [made]
    if isinstance(made, tuple | list):
        return [tensor for one in made for tensor in _within(one)]
    if dataclasses.is_dataclass(made):
        return [x for field in dataclasses.fields(made) for x in _within(getattr(made, field.name))]
    return []
