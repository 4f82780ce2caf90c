"""transformers' RMS norms as ours, where their class computes the same: which is tried on random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from app.kernels.gemm import DeferredNorm
from app.layers.context import BuildContext
from app.layers.norm import Norm, RMSNorm
from app.layers.offset_norm import OffsetRMSNorm
from app.models.transformers_backend.deferral import Normed, Sum, tensor_of

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "rms_norm_eps")
_SIZE = 16


class _Reading(Norm):
    """Takes open sums, and learns from a trace whether only products read its result."""

    may_defer: bool

    def begin(self) -> None:
        """Before a trace."""
        self.is_traced, self.is_read, self.takes_sums = True, False, False

    def settle(self) -> None:
        """After it."""
        self.is_traced = False
        self.may_defer = self.takes_sums and not self.is_read

    def of(self, x: Any) -> Any:
        """The norm of an open sum."""
        self.takes_sums = True
        normed = x.normed(self)
        if self.is_traced or isinstance(normed, DeferredNorm):
            return Normed(normed, x.shape, self._note)
        return normed.view(x.shape)

    def _note(self) -> None:
        self.is_read = True


class HfRMSNorm(_Reading, RMSNorm):
    """x / rms(x) * weight."""

    def forward(self, x: Any) -> Any:
        """[..., C], or what stands for it -> [..., C]."""
        if isinstance(x, Sum) and x.is_open:
            return self.of(x)
        x = tensor_of(x)  # on the meta device in a trace, where no kernel may be launched
        return torch.empty_like(x) if x.is_meta else RMSNorm.forward(self, x)


class HfOffsetRMSNorm(_Reading, OffsetRMSNorm):
    """x / rms(x) * (1 + weight)."""

    def forward(self, x: Any) -> Any:
        """[..., C], or what stands for it -> [..., C]."""
        if isinstance(x, Sum) and x.is_open:
            return self.of(x)
        x = tensor_of(x)  # on the meta device in a trace, where no kernel may be launched
        return torch.empty_like(x) if x.is_meta else OffsetRMSNorm.forward(self, x)


def exchange_norms(hf: nn.Module, ctx: BuildContext) -> list[_Reading]:
    """Put ours in the places of those that compute the same; returns them."""
    kinds: dict[tuple[type, float], type[HfRMSNorm | HfOffsetRMSNorm] | None] = {}
    ours: list[_Reading] = []
    for parent in list(hf.modules()):
        for name, module in list(parent.named_children()):
            eps = next((float(getattr(module, n)) for n in _EPS if isinstance(getattr(module, n, None), float)), None)
            if eps is None or not _has_one_vector(module):
                continue
            key = (type(module), eps)
            if key not in kinds:
                kinds[key] = _kind(module, eps)
            kind = kinds[key]
            if kind is not None:
                norm = kind(ctx, len(module.get_parameter("weight")), eps)
                norm.begin()
                parent.add_module(name, norm)
                ours.append(norm)
    return ours


def _has_one_vector(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters())
    return list(parameters) == ["weight"] and parameters["weight"].ndim == 1 and not list(module.children())


def _kind(module: nn.Module, eps: float) -> type[HfRMSNorm | HfOffsetRMSNorm] | None:
    """Finds which of ours computes the same; None: none."""
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(_SIZE, generator=generator, dtype=torch.float32)
        x = torch.randn(3, _SIZE, generator=generator, dtype=torch.float32) * 10 * eps**0.5
        twin = twin_of(module, {"weight": nn.Parameter(weight, requires_grad=False)})
        if hasattr(twin, "normalized_shape"):
            twin.normalized_shape = (_SIZE,)
        try:
            found = twin(x)
        except (RuntimeError, TypeError, AttributeError, ValueError):
            return None
        candidates: Iterable[tuple[type[HfRMSNorm | HfOffsetRMSNorm], torch.Tensor]] = (
            (HfRMSNorm, weight),
            (HfOffsetRMSNorm, 1 + weight),
        )
        for kind, factor in candidates:
            expected = F.rms_norm(x, (_SIZE,), factor, eps)
            if isinstance(found, torch.Tensor) and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
                return kind
    return None


def twin_of(module: nn.Module, parameters: dict[str, nn.Parameter], **children: nn.Module) -> Any:
    """A module of the same class and attributes, with other parameters and children."""
    twin: Any = copy(module)
    twin._parameters, twin._buffers, twin._modules = dict(parameters), {}, dict(children)
    return twin
