"""The layer for multi-token prediction that some checkpoints hold behind their last one, by its tensors' names: no
torch (I8)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.weight_files import NAMED_FILES, format_of, weight_map
from app.errors import CheckpointError

# Families whose checkpoints may hold such a layer.
ARCHITECTURES = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"})
OWN = ("eh_proj", "enorm", "hnorm", "shared_head.norm")  # what only that layer has


def promises_mtp(info: ModelInfo) -> bool:
    """True if config.json says that there is such a layer; checkpoints that were rewritten may lack it nevertheless."""
    return info.architecture in ARCHITECTURES and bool(info.hf_config.get("num_nextn_predict_layers"))


def missing_of_mtp(info: ModelInfo, load_format: str) -> str | None:
    """Says what keeps the layer from being read, None where all of it is there: its own tensors, and those that the
    model's last layer has (a checkpoint whose other layers alone were quantized stores it in another way)."""
    try:
        names = tensor_names(info.directory, load_format)
    except CheckpointError as error:
        return str(error)
    if names is None:
        return "the names of the checkpoint's tensors are not known before it is loaded"
    last, behind = (f"model.layers.{number}." for number in (info.num_layers - 1, info.num_layers))
    held = {name.removeprefix(behind) for name in names if name.startswith(behind)}
    like_last = [name.removeprefix(last) for name in names if name.startswith(last)]
    lacking = [name for name in like_last if name not in held]
    parts = {name.rpartition(".")[0] for name in held}
    lacking += [part for part in OWN if part not in parts]
    return f"the checkpoint has no {behind}{lacking[0]}" if lacking else None


def tensor_names(directory: Path, load_format: str) -> Collection[str] | None:
    """Names of a checkpoint's tensors, from its index or from a safetensors file's header; None of formats that hold
    none there. CheckpointError where there are no weights, or a damaged file."""
    kind = format_of(directory, load_format)
    if kind not in NAMED_FILES:
        return None
    single, index = NAMED_FILES[kind]
    if (directory / index).is_file():
        return weight_map(directory / index).keys()
    if kind == "safetensors":
        return SafetensorsHeader.read(directory / single).tensors.keys()
    return None
