"""The layer for multi-token prediction that some checkpoints hold behind their last one: how families name its tensors
and what they make of it, and whether all of it is there: no torch (I8).

A checkpoint's names become ours, those of the layer's parts: `enorm` and `hnorm`, the norms of the token and of the
hidden state; `eh_proj`, which joins both; `norm`, behind the layer; and the layer's own, as in other layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.checkpoints.model_info import ModelInfo
from app.checkpoints.safetensors_header import SafetensorsHeader
from app.checkpoints.weight_files import NAMED_FILES, format_of, weight_map
from app.errors import CheckpointError

FULL = "full_attention"
_NUMBER = "{number}"  # of the model's layers, in patterns
# What config.json says layer by layer.
_BY_LAYER = ("layer_types", "mlp_layer_types", "moe_layer_freq", "layers_block_type", "hybrid_override_pattern")


@dataclass(slots=True, frozen=True)
class MtpForm:
    """Says how a family has its layer."""

    names: tuple[tuple[str, str], ...]  # patterns of whole beginnings of a tensor's name, and what stands there of ours
    counted_by: str = "num_nextn_predict_layers"  # of config.json
    is_counted: bool = True  # False: config.json need not say that there is such a layer
    # Where the norm behind the layer counts: before the head alone, or for the next pass, too; "": there is none.
    norm: Literal["head", "features", ""] = "features"
    hidden_first: bool = False  # in what `eh_proj` reads
    masks_first: bool = True  # the first position was trained without a token
    is_dense: bool = False  # the layer has no experts, whatever others have
    kind: Literal["first", "last", "full"] = "last"  # it attends as this layer does
    table: str = r"model\.embed_tokens\.weight"  # pattern of the name of the model's table of tokens
    by_default: bool = True  # drafts although nobody asked

    def is_table(self, name: str) -> bool:
        """True if a tensor is the model's table of tokens."""
        return re.fullmatch(self.table, name) is not None

    def own_name(self, name: str, number: int) -> str | None:
        """Our name of a tensor of the layer, of a model with `number` layers; None: it is none of these."""
        for pattern, own in self.names:
            if found := re.match(pattern.replace(_NUMBER, str(number)), name):
                return own + name[found.end() :]
        return None


_OWN_HEAD = (r"model\.layers\.{number}\.shared_head\.norm\.", "norm.")
_BEHIND = (r"model\.layers\.{number}\.(?!shared_head\.|embed_tokens\.)", "")
_APART = (
    (r"mtp\.layers\.0\.", ""),
    (r"mtp\.fc\.", "eh_proj."),
    (r"mtp\.norm\.", "norm."),
    (r"mtp\.pre_fc_norm_embedding\.", "enorm."),
    (r"mtp\.pre_fc_norm_hidden\.", "hnorm."),
)
_DEEPSEEK = MtpForm((_OWN_HEAD, _BEHIND), norm="head")
_HUNYUAN = MtpForm(((r"model\.layers\.{number}\.final_layernorm\.", "norm."), _BEHIND))
_QWEN = MtpForm(_APART, counted_by="mtp_num_hidden_layers", masks_first=False, kind="full")
_EXAONE = MtpForm(_APART, masks_first=False, is_dense=True, kind="first")
_MIMO = MtpForm(
    (
        (r"model\.mtp_layers\.0\.token_layernorm\.", "enorm."),
        (r"model\.mtp_layers\.0\.hidden_layernorm\.", "hnorm."),
        (r"model\.mtp_layers\.0\.input_proj\.", "eh_proj."),
        (r"model\.mtp_layers\.0\.final_layernorm\.", "norm."),
        (r"model\.mtp_layers\.0\.", ""),
    ),
    hidden_first=True,
)
_ERNIE = MtpForm(
    (
        (r"model\.mtp_emb_norm\.0\.", "enorm."),
        (r"model\.mtp_hidden_norm\.0\.", "hnorm."),
        (r"model\.mtp_linear_proj\.0\.", "eh_proj."),
        (r"model\.mtp_block\.0\.", ""),
    ),
    norm="",
    is_dense=True,
)
_NEMOTRON_H = MtpForm(
    (
        (r"mtp\.layers\.0\.(?=(?:enorm|hnorm|eh_proj)\.)", ""),
        (r"mtp\.layers\.0\.norm\.", "input_layernorm."),
        (r"mtp\.layers\.0\.mixer\.", "self_attn."),
        (r"mtp\.layers\.1\.norm\.", "post_attention_layernorm."),
        (r"mtp\.layers\.1\.mixer\.", "mlp."),
        (r"mtp\.layers\.1\.final_layernorm\.", "norm."),
    ),
    masks_first=False,
    table=r"(?:backbone|model)\.embeddings\.weight",
    by_default=False,  # no GPU has timed it
)
_LONGCAT = MtpForm(
    (
        (r"model\.mtp\.layers\.0\.enorm\.m\.", "enorm."),
        (r"model\.mtp\.layers\.0\.hnorm\.m\.", "hnorm."),
        (r"model\.mtp\.layers\.0\.transformer_layer\.", ""),
        (r"model\.mtp\.layers\.0\.", ""),
        (r"model\.mtp\.norm\.", "norm."),
    ),
    is_counted=False,
    masks_first=False,
    is_dense=True,
    by_default=False,  # as above
)
FORMS: Mapping[str, MtpForm] = {
    **dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), _DEEPSEEK),
    "HYV3ForCausalLM": _HUNYUAN,
    "Qwen3NextForCausalLM": replace(_QWEN, counted_by="num_nextn_predict_layers", is_counted=False),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), _QWEN),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), _QWEN),
    "ExaoneMoeForCausalLM": _EXAONE,
    "MiMoForCausalLM": _MIMO,
    "Ernie4_5_MoeForCausalLM": _ERNIE,
    "NemotronHForCausalLM": _NEMOTRON_H,
    "LongcatFlashForCausalLM": _LONGCAT,
}


def promises_mtp(info: ModelInfo, *, by_default: bool = False) -> bool:
    """True if there may be such a layer by config.json; checkpoints that were rewritten may lack it nevertheless.
    `by_default`: and it drafts although nobody asked."""
    form = FORMS.get(info.architecture)
    if form is None or (by_default and not form.by_default):
        return False
    return bool(info.hf_config.get(form.counted_by, not form.is_counted))


def with_layer_behind(info: ModelInfo) -> ModelInfo:
    """The description of a model of one layer more, which is such a layer."""
    form, hf, count = FORMS[info.architecture], info.hf_config, info.num_layers
    changed: dict[str, Any] = {"num_hidden_layers": count + 1}
    like = slice(0, 1) if form.kind == "first" else slice(-1, None)
    changed |= {field: hf[field] + hf[field][like] for field in _BY_LAYER if isinstance(hf.get(field), list | str)}
    if form.kind == "full":  # nobody asks for those of the others
        changed["layer_types"] = [FULL] * (count + 1)
    return replace(info, hf_config={**hf, **changed})


def missing_of_mtp(info: ModelInfo, load_format: str) -> str | None:
    """Says what keeps the layer from being read, None where all of it is there: its own tensors, and those that a layer
    like it has (a checkpoint whose other layers alone were quantized stores it in another way)."""
    try:
        names = tensor_names(info.directory, load_format)
    except CheckpointError as error:
        return str(error)
    if names is None:
        return "the names of the checkpoint's tensors are not known before it is loaded"
    form, number = FORMS[info.architecture], info.num_layers
    held = {own for name in names if (own := form.own_name(name, number)) is not None}
    lacking = [name for name in _of_a_layer_like(names, form, info) if name not in held]
    parts = {name.rpartition(".")[0] for name in held}
    lacking += [part for part in ("eh_proj", "enorm", "hnorm", *(["norm"] if form.norm else [])) if part not in parts]
    return f"the checkpoint has no tensor of it for {lacking[0]}" if lacking else None


def _of_a_layer_like(names: Collection[str], form: MtpForm, info: ModelInfo) -> list[str]:
    """Names within the layer that is built as the one behind the last: that with the same kind of attention. Of a layer
    without experts, where others have them, the attention's alone."""
    kinds = info.hf_config.get("layer_types")
    like = 0 if form.kind == "first" else info.num_layers - 1
    if form.kind == "full" and isinstance(kinds, list) and FULL in kinds:
        like = max(index for index, kind in enumerate(kinds) if kind == FULL)
    found = (re.match(rf"(?:model\.|language_model\.)+layers\.{like}\.(.*)", name) for name in names)
    own = [match[1] for match in found if match is not None]
    return [name for name in own if "rotary_emb" not in name and not (form.is_dense and name.startswith("mlp."))]


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
