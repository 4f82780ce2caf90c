"""adapter_config.json: what PEFT says of an adapter, as far as it changes an answer. No torch (I8).

A setting that we do not honour is refused by name, one that nobody here has heard of as well: an adapter that is run as
something else than it was trained as would answer, and wrongly.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from app.checkpoints.fields.kinds import FLAG, OBJECT, TEXT, Kind, check, either, number, several, whole
from app.checkpoints.json_file import read_object
from app.errors import CheckpointError, UnsupportedError

CONFIG_FILE = "adapter_config.json"
PARAM = "lora_path"
MOST_RANK = 1 << 12  # of any adapter; an engine's own limit is far below
MOST_PATTERNS = 256  # PEFT writes a handful
MOST_PATTERN_CHARS = 256
MOST_SAVED = 64  # modules that are saved whole; parameters that are named
PATTERN_TIME_S = 0.5  # of a core, that all matches of an object of patterns may take together
# What a pattern is made of that names modules. Repetitions by number could make one of a few characters that takes
# gigabytes.
_PATTERN = regex.compile(r"[\w.\\*+?|()\[\]^$-]*")

_ALPHA = number(above=0, most=1e6)
_PATTERNS = Kind(f"an object of at most {MOST_PATTERNS:,}", lambda v: OBJECT.holds(v) and len(v) <= MOST_PATTERNS)
_FIELDS: Mapping[str, Kind] = {
    "r": whole(1, MOST_RANK),
    "lora_alpha": _ALPHA,
    "lora_dropout": number(0, 1),
    "rank_pattern": _PATTERNS,
    "alpha_pattern": _PATTERNS,
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "inference_mode"), FLAG),
    **dict.fromkeys(("ensure_weight_tying",), FLAG),
    "modules_to_save": several(TEXT, MOST_SAVED),
    "target_parameters": several(TEXT, MOST_SAVED),
    "base_model_name_or_path": TEXT,
    "init_lora_weights": either(FLAG, TEXT),
    "target_modules": either(TEXT, several(TEXT, 1 << 16)),
}
# What no answer depends on: where it came from, what training did. Tensors' names say which modules it is for.
_OF_NO_MATTER = frozenset(
    {
        "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision",
        "inference_mode", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "runtime_config", "qalora_group_size",
    }
)  # fmt: skip
# Parameters of transformers' layers of experts, in their order there: all experts of a layer in one tensor.
EXPERT_PARTS = ("gate_up_proj", "down_proj")
# What is read here.
_READ = frozenset(
    {
        "bias", "r", "lora_alpha", "fan_in_fan_out", "use_rslora", "rank_pattern", "alpha_pattern",
        "init_lora_weights", "use_dora", "lora_bias", "modules_to_save", "ensure_weight_tying", "target_parameters",
    }
)  # fmt: skip
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")  # ways to begin that leave the base model's weights
_BIASES = (None, "none", "lora_only", "all")
# Why a setting is refused, where there is more to say than that it is unknown.
_REFUSED: Mapping[str, str] = {
    "trainable_token_indices": "embeddings of single tokens are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "layer_replication": "layers that run several times are not supported",
    "use_qalora": "QALoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "megatron_config": "Megatron's layers are not supported",
}


class ModulePatterns:
    """Numbers of modules, by patterns of their names. Compiled once; all matches together have PATTERN_TIME_S."""

    def __init__(self, patterns: Mapping[str, Any], kind: Kind, what: str) -> None:
        """CheckpointError names, behind `what`, a pattern or number that is none."""
        self._what = what
        self._left_s = PATTERN_TIME_S
        self._compiled = tuple((self._compile(pattern), value) for pattern, value in patterns.items())
        for pattern, value in patterns.items():
            if not kind.holds(value):
                raise CheckpointError(f"{what}: {pattern!r:.80} is {value!r:.80}, not {kind.expected}", param=PARAM)

    def _compile(self, pattern: str) -> Any:
        if len(pattern) > MOST_PATTERN_CHARS or not _PATTERN.fullmatch(pattern):
            raise CheckpointError(f"{self._what} has the pattern {pattern!r:.80}, no name of modules", param=PARAM)
        try:
            return regex.compile(rf"(?:.*\.)?(?:{pattern})$")
        except (regex.error, RecursionError) as error:
            raise CheckpointError(f"{self._what} has the pattern {pattern!r:.80}: {error}", param=PARAM) from None

    def first(self, module: str, usual: float) -> float:
        """The number of the first pattern that the module's name ends in."""
        for pattern, value in self._compiled:
            if self._matches(pattern, module):
                return float(value)
        return usual

    def _matches(self, pattern: Any, module: str) -> bool:
        while self._left_s > 0:
            began = time.thread_time()  # `timeout` also counts what other threads do meanwhile
            try:
                return pattern.match(module, timeout=self._left_s) is not None
            except TimeoutError:
                continue
            finally:
                self._left_s -= time.thread_time() - began
        raise CheckpointError(f"{self._what}: its patterns take too long to match", param=PARAM)


@dataclass(slots=True, frozen=True)
class AdapterConfig:
    """The settings that an answer depends on."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    is_transposed: bool  # its base layers hold their weights as [in, out] (GPT-2)
    ranks: ModulePatterns
    alphas: ModulePatterns
    has_magnitudes: bool  # DoRA (Liu et al., 2024)
    has_second_biases: bool  # behind the second matrices
    biases: str  # whose were trained: those of no layer, of its own layers ("lora_only"), of "all"
    saved: tuple[str, ...]  # modules that it holds whole
    ties: bool  # what is tied in the base model it changes alike
    expert_parts: tuple[str, ...]  # of EXPERT_PARTS, those whose experts it changes in one tensor
    content: bytes  # the whole file in one spelling, for the adapter's digest

    @classmethod
    def read(cls, file: Path) -> AdapterConfig:
        """CheckpointError, UnsupportedError name the field at fault."""
        fields = read_object(file, param=PARAM)
        _refuse_unknown(fields, file)
        try:
            check(fields, _FIELDS, str(file))
            ranks, alphas = (
                ModulePatterns(fields.get(name) or {}, kind, f"{file} is not usable: {name}")
                for name, kind in (("rank_pattern", _FIELDS["r"]), ("alpha_pattern", _ALPHA))
            )
        except CheckpointError as error:
            raise CheckpointError(error.message, param=PARAM) from None
        return cls(
            rank=int(fields.get("r") or 8),
            alpha=float(fields.get("lora_alpha") or 8),
            is_rank_stabilized=bool(fields.get("use_rslora")),
            is_transposed=bool(fields.get("fan_in_fan_out")),
            ranks=ranks,
            alphas=alphas,
            has_magnitudes=bool(fields.get("use_dora")),
            has_second_biases=bool(fields.get("lora_bias")),
            biases=fields.get("bias") or "none",
            saved=tuple(fields.get("modules_to_save") or ()),
            ties=bool(fields.get("ensure_weight_tying")),
            expert_parts=tuple(one for one in EXPERT_PARTS if one in _leaves(fields.get("target_parameters") or ())),
            content=json.dumps(fields, sort_keys=True, separators=(",", ":")).encode(),
        )

    def of_module(self, module: str) -> tuple[int, float]:
        """(rank, factor of the product) of a module of the base model, by the first pattern that its name ends in."""
        rank = int(self.ranks.first(module, self.rank))
        alpha = float(self.alphas.first(module, self.alpha))
        return rank, alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def saves(self, module: str) -> bool:
        """True if the module is one that is held whole, or a part of one."""
        return any(f".{saved}." in f".{module}." for saved in self.saved)


def _leaves(parameters: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in parameters}


def _refuse_unknown(fields: Mapping[str, Any], file: Path) -> None:
    if (kind := fields.get("peft_type")) != "LORA":
        raise UnsupportedError(f"{file}: peft_type is {kind!r:.80}; known: LORA", param=PARAM)
    begun = fields.get("init_lora_weights", True)
    if begun is not None and begun not in _KEEP_THE_BASE:
        what = f"init_lora_weights is {begun!r:.80}, which changes the base model's weights; convert it to plain LoRA"
        raise UnsupportedError(f"{file}: {what}", param=PARAM)
    if fields.get("bias", "none") not in _BIASES:
        raise UnsupportedError(f"{file}: bias is {fields['bias']!r:.80}; known: none, lora_only, all", param=PARAM)
    if fields.get("lora_bias") and fields.get("use_dora"):
        raise UnsupportedError(f"{file}: lora_bias and use_dora together are not supported", param=PARAM)
    for name in fields.keys() - _OF_NO_MATTER - _READ:
        if fields[name]:
            reason = _REFUSED.get(name, "no setting that is known here")
            raise UnsupportedError(f"{file}: {name[:80]} is {fields[name]!r:.80}: {reason}", param=PARAM)
