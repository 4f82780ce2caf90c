"""GPT-OSS as it is published, experts in MXFP4: against transformers with the numbers that it makes of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from app.layers.experts.expert_linear import ExpertLinear
from app.layers.experts.expert_mlp import Experts
from app.quantization.base import StoredModule
from app.quantization.mxfp4 import Mxfp4
from tests.loading.load_formats.formats import contexts, fill
from tests.loading.test_quantized_modules import HEADS, PROMPT, check_logits
from tests.models.families.expert_variants import EXPERT_VARIANTS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, all_logits


def test_experts_alone_are_stored_so() -> None:
    method = Mxfp4.of_checkpoint({"modules_to_not_convert": ["model.layers.0.mlp.experts", "lm_head"]})
    names = [f"model.layers.{layer}.mlp.experts.3.down_proj" for layer in (0, 1)] + ["model.layers.1.self_attn.q_proj"]
    found = [method.method_of(StoredModule(name, "linear", torch.float32, 8, 8)) is not None for name in names]
    assert found == [False, True, False]


def mxfp4_model(directory: Path) -> Path:
    """GPT-OSS as published: random codes, and scales that differ. `judge` beside it has transformers' numbers."""
    changes = {**EXPERT_VARIANTS["gpt_oss"][1], **HEADS, "intermediate_size": 96}
    for copy in (directory, directory.parent / "judge"):
        shutil.copytree(tiny_model("gpt_oss", **changes), copy)
    tensors, plain = (load_file(directory / "model.safetensors") for _ in range(2))
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = scales = torch.randint(121, 126, blocks.shape[:-1], dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(plain, directory.parent / "judge" / "model.safetensors", {"format": "pt"})
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def numbers(linear: ExpertLinear) -> torch.Tensor:
    """What the experts multiply by, [E, N, K]."""
    made = linear.multiplier
    return made if isinstance(made, torch.Tensor) else torch.stack([made.dequantize(e) for e in range(made.shape[0])])


def test_mxfp4_of_gpt_oss_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    directory = mxfp4_model(tmp_path / "model")
    driver = check_logits(directory)
    # A rank's share of 96 ends within a block of 32; whole experts, and shares, make up the whole.
    assert driver.worker._parts is not None
    layers = [module for module in driver.worker._parts.model.modules() if isinstance(module, Experts)]
    whole = numbers(layers[0].gate_up_proj)
    for tp in (2, 4):
        shares = []
        for ctx in contexts(directory, tp):
            linear: ExpertLinear = fill(directory, ctx=ctx).model.layers["0"].mlp.experts.gate_up_proj
            linear.pack()
            shares.append(numbers(linear))
        gate, up = (torch.cat(halves, 1) for halves in zip(*(share.chunk(2, 1) for share in shares), strict=True))
        torch.testing.assert_close(torch.cat((gate, up), 1), whole)


def test_random_codes_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    directory = mxfp4_model(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    logits = all_logits(Driver(str(directory), num_blocks=16, load_format="dummy"), PROMPT)
    assert logits.isfinite().all()
    assert logits.std() > 0
