"""Checkpoints of AWQ (Lin et al., 2023) in the form of its `gemm` kernel: codes of 4 bits, eight outputs in a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import UnsupportedError
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.bits import unpack_bits
from app.quantization.forms import GroupForm, WeightForm

BITS = 4
_WORD = Dim("output", 8)
# The place in a word of each of its eight outputs: the kernel's own order.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_VERSIONS = ("gemm", "exllama", "ipex")  # which lay weights out alike
_VERSION_FIELDS = ("version", "checkpoint_format")  # AutoAWQ's, GPTQModel's


@dataclass(slots=True, frozen=True)
class StoredAwq(QuantMethod):
    """One weight."""

    dtype: torch.dtype  # the type that the model computes in
    group: int  # inputs that share a scale; 0: all

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """See QuantMethod."""
        return (
            Leaf("qweight", torch.int32, (Dim("input"), _WORD)),
            Leaf("qzeros", torch.int32, (self._groups, _WORD)),
            Leaf("scales", torch.float32, (self._groups, Dim("output")), dummy=0.005),
        )

    @property
    def _groups(self) -> Dim:
        return Dim("input", self.group) if self.group else Dim("unit")

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        codes, zeros = (shares.own(unpacked_words(stored[name]), 1, _WORD) for name in ("qweight", "qzeros"))
        scale = stored["scales"]
        offset, group = -zeros.float() * scale, max(1, shares.num_inputs)
        if self.group:
            scale, group = shares.spread(scale, 0, self._groups)
            offset, _ = shares.spread(offset, 0, self._groups)
        return GroupForm(
            codes.t().contiguous(), scale.t().contiguous(), group, BITS, self.dtype, offset.t().contiguous()
        )


def unpacked_words(words: torch.Tensor) -> torch.Tensor:
    """int32 [M, N / 8], eight outputs in the order of the `gemm` kernel -> uint8 [M, N]."""
    places = torch.tensor(_PLACES, device=words.device)
    codes = unpack_bits(words, BITS).reshape(len(words), -1, 8)
    return codes.index_select(2, places).flatten(1)


@dataclass(slots=True, frozen=True)
class Awq(QuantMethod):
    """A whole checkpoint: its linear layers but for those named, not its output head."""

    group: int
    skipped: tuple[str, ...]

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """None for a module whose name holds one of those left as they were."""
        if module.is_plain or module.kind != "linear" or any(name in module.name for name in self.skipped):
            return None
        return StoredAwq(module.dtype, self.group)

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError names what this checkpoint has otherwise."""
        bits = scheme.get("bits", scheme.get("w_bit", BITS))
        group = scheme.get("group_size", scheme.get("q_group_size", 128))
        for name in _VERSION_FIELDS:
            version = str(scheme.get(name) or "gemm").lower()
            if version not in _VERSIONS:
                raise UnsupportedError(f"awq: {name}={version}; take a checkpoint of version gemm", param="model")
        if bits != BITS or not scheme.get("zero_point", True):
            found = f"bits={bits}, zero_point={scheme.get('zero_point', True)}"
            raise UnsupportedError(f"awq: {found}; only 4 bits with zeros are known", param="model")
        if not isinstance(group, int) or (group < 1 and group != -1):
            raise UnsupportedError(f"awq: group_size={group!r}", param="model")
        return cls(max(group, 0), tuple(scheme.get("modules_to_not_convert") or ()))
