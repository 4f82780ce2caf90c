"""Checkpoints of SqueezeLLM (Kim et al., 2023) without its sparse part: a table of 16 numbers for each output, and a
code of 4 bits for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from app.checkpoints.tensors.leaf import Dim, Leaf
from app.errors import UnsupportedError
from app.quantization.base import QuantMethod, StoredModule, WeightShares
from app.quantization.bits import unpack_bits
from app.quantization.forms import RowTableForm, WeightForm

_SPARSE = ("rows", "cols", "vals", "full_rows", "full_row_indices")


@dataclass(slots=True, frozen=True)
class Table4(QuantMethod):
    """One weight."""

    dtype: torch.dtype

    def leaves(self, dtype: torch.dtype) -> tuple[Leaf, ...]:
        """Eight inputs an entry, the first in its lowest bits."""
        return (
            Leaf("qweight", torch.int32, (Dim("input", 8), Dim("output"))),
            Leaf("lookup_table", torch.float32, (Dim("output"), Dim("unit", entries=16))),
        )

    def unpack(self, stored: Mapping[str, torch.Tensor], shares: WeightShares) -> WeightForm:
        """See QuantMethod."""
        codes = shares.own(unpack_bits(stored["qweight"].t(), 4), 1, Dim("input", 8))
        table = stored["lookup_table"]
        ones = torch.ones(len(table), 1, device=table.device)
        return RowTableForm(codes, table, ones, shares.num_inputs, self.dtype)


class SqueezeLLM(QuantMethod):
    """A whole checkpoint: its linear layers, not its output head."""

    def method_of(self, module: StoredModule) -> QuantMethod | None:
        """UnsupportedError names a layer with a sparse part."""
        found = [name for name in _SPARSE if name in (module.tensors or ())]
        if found:
            raise UnsupportedError(f"SqueezeLLM: {module.name}.{found[0]}: sparse parts are not read", param="model")
        return Table4(module.dtype) if module.kind == "linear" and not module.is_plain else None

    @classmethod
    def of_checkpoint(cls, scheme: Mapping[str, Any]) -> QuantMethod:
        """UnsupportedError where codes have another width than 4 bits."""
        if scheme.get("wbits", 4) != 4:
            raise UnsupportedError(f"SqueezeLLM: wbits={scheme['wbits']}; only 4 are read", param="model")
        return cls()
