"""Weights replaced in place: from a directory, from tensors in memory, from another process (transfer.py).

Each request is answered with one set of weights: what has given tokens when they are replaced ends before, by itself
(`wait`) or with an error (`abort`, `keep`); what has not is computed with the new ones, unless aborted. The revision
changes with the weights, so no block of the prefix cache is taken for one of the others (I5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.model_revision import model_revision
from app.engine.control.pause import Mode, hold
from app.engine.control.sleep import go_on
from app.engine.core import EngineCore
from app.errors import CheckpointError, InvalidRequestError

ENDED = "the model's weights were replaced while it was answered: ask again"
# What a trainer may write differently into a config.json of the same model.
OF_NO_MATTER = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "_commit_hash"})


def check_weights(core: EngineCore, path: str) -> str:
    """The revision that the weights in a directory would give; CheckpointError, InvalidRequestError where they do not
    fit the model. Nothing is changed."""
    if not Path(path).is_absolute() or not Path(path).is_dir():  # the name of a hub's model would be downloaded
        raise CheckpointError(
            f"path: {path[:256]!r} is not the absolute path of a directory on this node", param="path"
        )
    info = ModelInfo.from_directory(path, overrides=core.config.hf_overrides)
    _same_model(core.info, info)
    core.call_workers("check_weights", path)
    return model_revision(info, core.config)


def update_weights(core: EngineCore, path: str, mode: Mode = "wait") -> Generator[None, None, str]:
    """Replace all weights by those of a directory that every worker's node has; their revision.

    What does not fit is refused before anything changes. If reading fails later, the engine has no weights, and refuses
    requests until they have come.
    """
    revision = check_weights(core, path)
    yield from start_weight_update(core, mode)
    return _load(core, path, revision)


def reload_weights(core: EngineCore, mode: Mode = "wait") -> Generator[None, None, str]:
    """Bring the weights of the model's own directory back; their revision. Where the engine had them before, requests
    that stand still go on afterwards."""
    revision = model_revision(core.info, core.config)
    if revision == core.stats().model_revision:
        yield from hold(core, "update", "keep")
        core.scheduler.preempt_all()
        _begin(core)
    else:
        yield from start_weight_update(core, mode)
    return _load(core, "", revision)


def start_weight_update(core: EngineCore, mode: Mode = "wait") -> Generator[None]:
    """From now on nothing is computed, until `finish_weight_update` follows the new weights; requests wait."""
    _refuse_asleep(core)
    yield from hold(core, "update", mode)
    core.restart(ENDED)
    core.forget_prefixes()
    _begin(core)


@contextmanager
def refusing_once_failed(core: EngineCore) -> Iterator[None]:
    """Requests wait for the weights no longer, but are refused, once this part of an update has failed."""
    try:
        yield
    except BaseException:
        core.state.is_updating = False
        raise


def _load(core: EngineCore, path: str, revision: str) -> str:
    with refusing_once_failed(core):
        core.call_workers("load_directory", path)
    return finish_weight_update(core, revision=revision, whole=True)


def _begin(core: EngineCore) -> None:
    _refuse_asleep(core)
    core.state.is_updating = True
    with refusing_once_failed(core):
        core.call_workers("begin_update", core.state.weights_missing)
    core.state.weights_missing = True


def _refuse_asleep(core: EngineCore) -> None:
    if "weights" in core.state.asleep:
        raise InvalidRequestError("the weights are asleep: wake_up first, with tags=weights")


def load_weights(core: EngineCore, tensors: list[Any]) -> None:
    """Take in tensors: pairs of the name in the checkpoint and a tensor of torch's, whole, on whatever device."""
    with refusing_once_failed(core):
        core.call_workers("load_tensors", tensors)


def finish_weight_update(core: EngineCore, revision: str = "", version: str = "", whole: bool = False) -> str:
    """Compute with the new weights; `whole`: refuse if some are missing. Their revision: `revision`, or one made of the
    last one and `version`, which says what came (all replicas that are to be equal must be told the same)."""
    with refusing_once_failed(core):
        core.defer(core.call_workers("finish_update", whole))
    if not revision:
        told = f"{core.stats().model_revision}/{version}".encode()
        revision = hashlib.blake2b(told, digest_size=16).hexdigest()
    core.state.weights_missing = core.state.is_updating = False
    core.use_revision(revision)
    core.release("update")
    go_on(core)
    return revision


def _same_model(old: ModelInfo, new: ModelInfo) -> None:
    """InvalidRequestError names what the new weights' model has otherwise."""
    keys = sorted((old.hf_config.keys() | new.hf_config.keys()) - OF_NO_MATTER)
    for key in keys:
        if old.hf_config.get(key) != new.hf_config.get(key):
            raise InvalidRequestError(
                f"path: these are weights of another model: {key} is {new.hf_config.get(key)!r}, here "
                f"{old.hf_config.get(key)!r}",
                param="path",
            )
