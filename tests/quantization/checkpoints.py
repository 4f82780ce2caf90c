"""Tiny checkpoints whose linear layers are packed by somebody else, beside those of the numbers that they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from app.layers.experts.expert_linear import ExpertLinear
from app.layers.linear import Linear
from app.layers.stored_weight import StoredWeight
from tests.loading.load_formats.formats import contexts, fill
from tests.tiny_models import hf_model
from tests.worker.worker_driver import Driver, all_logits

PROMPT = [5, 9, 200, 31, 7, 77]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# What a module `name` with `weight` [N, K] becomes: its tensors by leaf, and the weight that they stand for. None: it
# stays as it is.
Pack = Callable[[str, torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor] | None]


@dataclass(frozen=True)
class Shown:
    """A tensor of a checkpoint as methods may look at it."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def whole(self) -> torch.Tensor:
        return self.tensor


def write(
    source: Path, directory: Path, pack: Pack, scheme: Mapping[str, Any], linear: str = r"_proj\.weight$"
) -> Path:
    """`directory`/model, with `quantization_config`, and `directory`/judge, plain."""
    for name in ("model", "judge"):
        shutil.copytree(source, directory / name)
    tensors, plain = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    for name in [name for name in tensors if re.search(linear, name)]:
        module = name.removesuffix(".weight")
        packed = pack(module, tensors[name].float())
        if packed is not None:
            del tensors[name]
            plain[name] = packed[1].contiguous()
            tensors |= {f"{module}.{leaf}": tensor.contiguous() for leaf, tensor in packed[0].items()}
    save_file(tensors, directory / "model" / "model.safetensors")
    save_file(plain, directory / "judge" / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = dict(scheme)
    (directory / "model" / "config.json").write_text(json.dumps(config))
    return directory / "model"


def change(directory: Path, name: str, make: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Replace one tensor, or take it away."""
    tensors = load_file(directory / "model.safetensors")
    before = tensors.pop(name)
    if make is not None:
        tensors[name] = make(before).contiguous()
    save_file(tensors, directory / "model.safetensors")


def check_logits(directory: Path, **options: Any) -> Driver:
    """Logits in fp32 are those of transformers with the plain weights, within 1e-3."""
    driver = Driver(str(directory), num_blocks=16, **options)
    judge = hf_model(directory.parent / "judge")
    with torch.inference_mode():
        expected = judge(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(all_logits(driver, PROMPT), expected, rtol=0, atol=1e-3)
    return driver


def check_stored(directory: Path) -> None:
    """What every linear layer and all experts unpack are the plain weights, whatever the family fuses."""
    judge = dict(fill(directory.parent / "judge").named_modules())
    for name, layer in fill(directory).named_modules():
        if isinstance(layer, Linear | ExpertLinear):
            assert not layer.stored[0].is_plain, name
            found = [_dequantized(weight) for weight in layer.stored]
            expected = judge[name].weight.data
            if isinstance(layer, ExpertLinear):  # a plain model may hold there what tokens share, too
                expected = expected[: len(found[0])]
            torch.testing.assert_close(torch.cat(found, -2), expected, rtol=1e-5, atol=1e-6, msg=name)


def _dequantized(weight: StoredWeight) -> torch.Tensor:
    if not weight.experts:
        return weight.form().dequantize()
    return torch.stack([form.dequantize() for form in weight.forms()])


def check_weights(directory: Path, tp: int = 1) -> None:
    """What each rank unpacks are its shares of the plain weights."""
    whole = load_file(directory.parent / "judge" / "model.safetensors")
    for rank, ctx in enumerate(contexts(directory, tp)):
        model = fill(directory, ctx=ctx)
        for number, layer in model.model.layers.items():
            prefix = f"model.layers.{number}."
            columns = {"self_attn": ("qkv_proj", "qkv"), "mlp": ("gate_up_proj", ("gate", "up"))}
            for block, (fused, parts) in columns.items():
                linear = getattr(getattr(layer, block), fused)
                own = []
                for part in parts:
                    share = linear.output_shares[f"{part}_proj"]
                    own.append(whole[f"{prefix}{block}.{part}_proj.weight"][share.start :][: share.size])
                found = torch.cat([weight.form().dequantize() for weight in linear.stored])
                torch.testing.assert_close(found, torch.cat(own), rtol=1e-5, atol=1e-6)
            for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
                linear = getattr(getattr(layer, block), name)
                own_columns = whole[f"{prefix}{block}.{name}.weight"].chunk(tp, 1)[rank]
                torch.testing.assert_close(linear.stored[0].form().dequantize(), own_columns, rtol=1e-5, atol=1e-6)
