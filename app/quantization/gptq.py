"""Checkpoints of GPTQ (Frantar et al., 2022), as AutoGPTQ and GPTQModel write them: codes of 2, 3, 4 or 8 bits along
the inputs, groups in any order, and rules for single modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import CheckpointError, UnsupportedError
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.bits import unpack_bits, words_of
from app.quantization.forms import GroupForm, WeightForm
from app.quantization.input_order import is_ordered, sorted_groups
from app.quantization.name_patterns import PatternTime

_BITS = (2, 3, 4, 8)
_OF_RULES = ("bits", "group_size")  # of what a rule may say: the rest, `g_idx` and the zeros say
_FORMS = ("gptq", "gptq_v2")  # the first one stores a zero less 1


@dataclass(slots=True, frozen=True)
class StoredGptq(QuantMethod):
    """One weight."""

    dtype: torch.dtype  # the type that the model computes in
    bits: int
    group: int  # inputs that share a scale; 0: all
    zeros_less_one: bool
    ordered: bool  # `g_idx` says which group an input is of
    unused: tuple[str, ...] = ()

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        leaves = (
            Leaf("qweight", torch.int32, (self._words("input"), Dim("output"))),
            Leaf("qzeros", torch.int32, (self._groups, self._words("output")), dummy=self._middle),
            Leaf("scales", torch.float32, (self._groups, Dim("output")), dummy=0.08 / (1 << self.bits)),
        )
        return (*leaves, Leaf("g_idx", torch.int32, (Dim("input"),))) if self.ordered else leaves

    def _words(self, axis: Any) -> Dim:
        return Dim(axis, *words_of(self.bits))

    @property
    def _middle(self) -> int | None:
        """A word of the zeros of symmetric checkpoints; None: codes that no word repeats."""
        if 32 % self.bits:
            return None
        zero = (1 << (self.bits - 1)) - self.zeros_less_one
        word = sum(zero << shift for shift in range(0, 32, self.bits))
        return word - (word >> 31 << 32)

    @property
    def _groups(self) -> Dim:
        return Dim("input", self.group, whole=self.ordered) if self.group else Dim("unit")

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        codes = shares.own(unpack_bits(stored["qweight"].t(), self.bits), 1, self._words("input"))
        zeros = shares.own(unpack_bits(stored["qzeros"], self.bits), 1, self._words("output"))
        if self.zeros_less_one:
            zeros = (zeros + 1) & (1 << self.bits) - 1  # a zero of 0 was stored as the largest code
        scale = stored["scales"]
        offset = -zeros.float() * scale
        if self.ordered:
            return sorted_groups(codes, scale.t(), offset.t(), stored["g_idx"], self.bits, self.dtype)
        group = max(1, shares.num_inputs)
        if self.group:
            scale, group = shares.spread(scale, 0, self._groups)
            offset, _ = shares.spread(offset, 0, self._groups)
        return GroupForm(codes, scale.t().contiguous(), group, self.bits, self.dtype, offset.t().contiguous())


@dataclass(slots=True, frozen=True)
class Rule:
    """Says what holds for modules of certain names."""

    pattern: str
    options: tuple[tuple[str, Any], ...] | None  # None: they are left as they were

    @classmethod
    def of(cls, pattern: str, options: Mapping[str, Any] | None) -> Rule:
        """A line of `dynamic`: names behind `+:`, `-:` (left out) or nothing."""
        leaves_out = pattern.startswith("-:")
        known = tuple((name, options[name]) for name in _OF_RULES if name in options) if options else ()
        return cls(pattern.removeprefix("-:").removeprefix("+:"), None if leaves_out else known)


@dataclass(slots=True, frozen=True)
class Gptq(QuantMethod):
    """A whole checkpoint."""

    bits: int
    group: int
    zeros_less_one: bool
    head: bool
    rules: tuple[Rule, ...]
    in_order: bool = True  # False: each quantized module says by `g_idx` which inputs make a group
    patterns: PatternTime = field(default_factory=PatternTime, compare=False, repr=False)

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """The method of the first rule that fits its name; a module that lies there as a plain weight is one."""
        if module.is_plain or module.kind == "embedding" or (module.kind == "head" and not self.head):
            return None
        rule = next((rule for rule in self.rules if self.patterns.begins(rule.pattern, module.name)), Rule("", ()))
        if rule.options is None:
            return None
        options = dict(rule.options)
        bits, group = _sizes(options.get("bits", self.bits), options.get("group_size", self.group or -1))
        ordered = group > 0 and is_ordered(module, "g_idx", group, must_say=not self.in_order)
        unused = () if ordered else ("g_idx",)
        return StoredGptq(module.dtype, bits, group, self.zeros_less_one, ordered, unused + _zero_bias(module))

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        form = scheme.get("checkpoint_format") or ("marlin" if scheme.get("is_marlin_format") else "gptq")
        if form not in _FORMS:
            raise UnsupportedError(f"gptq: checkpoint_format={form}; known: {', '.join(_FORMS)}", param="model")
        bits, group = _sizes(scheme.get("bits"), scheme.get("group_size", -1))
        dynamic = scheme.get("dynamic") or {}
        if not isinstance(dynamic, Mapping):
            raise UnsupportedError(f"gptq: dynamic={dynamic!r:.80}, not an object of rules", param="model")
        rules = tuple(Rule.of(pattern, options) for pattern, options in dynamic.items())
        return cls(bits, group, form == "gptq", bool(scheme.get("lm_head")), rules, not scheme.get("desc_act"))


def _sizes(bits: Any, group: Any) -> tuple[int, int]:
    """Bits, and inputs in a group, 0 for all."""
    if bits not in _BITS:
        raise UnsupportedError(f"gptq: bits={bits}; known: {', '.join(map(str, _BITS))}", param="model")
    if not isinstance(group, int) or (group < 1 and group != -1):
        raise UnsupportedError(f"gptq: group_size={group!r}", param="model")
    return bits, max(group, 0)


def _zero_bias(module: StoredModule) -> tuple[str, ...]:
    """Biases of layers that have none, which AutoGPTQ wrote as zeros; CheckpointError where they are not."""
    bias = (module.tensors or {}).get("bias")
    if module.has_bias or bias is None:
        return ()
    if bool(bias.whole().any()):
        raise CheckpointError(f"{module.name}.bias: the model has no such bias", param="model")
    return ("bias",)
