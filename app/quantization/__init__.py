"""Quantization methods by name: one file and one line (app/backends.py) each. A method says which tensors a linear
layer stores and turns them into a `PackedWeight` that multiplies; layers and loader know nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from app.backends import QUANT_METHODS
from app.errors import ConfigError, UnsupportedError
from app.quantization.base import QuantMethod
from app.quantization.config_fields import check_fields, named_errors
from app.quantization.plain import PLAIN_METHOD


def select_quantization(
    name: str | None, scheme: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[QuantMethod, list[str]]:
    """The method `name`, or that of a checkpoint with the `quantization_config` `scheme`, and a line that says so.

    ConfigError where it cannot run, UnsupportedError for a checkpoint that nobody here can read.
    """
    with named_errors("config.json"):
        check_fields(scheme)
    stored = None if _keeps_plain_weights(scheme) else str(scheme.get("quant_method", "unknown"))
    if stored is None and name is None:
        return PLAIN_METHOD, []
    if stored is not None and name is not None and not _is_one_method(name, stored):
        raise ConfigError(
            f"quantization={name}, but the checkpoint is quantized already ({stored}); leave it out",
            param="quantization",
        )
    method = _while_loading(str(name)) if stored is None else _of_checkpoint(stored, scheme)
    method.check(device, dtype)
    where = "linear layers" if stored is None else "linear layers, as in the checkpoint"
    return method, [f"quantization: {stored or name} ({where})"]


def _is_one_method(name: str, stored: str) -> bool:
    """True if two names mean the same class."""
    return name == stored or (stored in QUANT_METHODS and QUANT_METHODS.load(name) is QUANT_METHODS.load(stored))


def _while_loading(name: str) -> QuantMethod:
    kind: type[QuantMethod] = QUANT_METHODS.load(name)
    return kind.while_loading()


def _of_checkpoint(name: str, scheme: Mapping[str, Any]) -> QuantMethod:
    if reason := QUANT_METHODS.withheld(name):
        raise UnsupportedError(f"the checkpoint is quantized: {reason}", param="model")
    if name not in QUANT_METHODS:
        raise UnsupportedError(f"quantized checkpoints are not supported (quant_method {name!r})", param="model")
    kind: type[QuantMethod] = QUANT_METHODS.load(name)
    with named_errors(f"a checkpoint of quant_method {name}"):
        return kind.of_checkpoint(scheme)


def _keeps_plain_weights(scheme: Mapping[str, Any]) -> bool:
    """True if weights are plain; scales for the KV cache alone may be there (compressed-tensors without groups)."""
    cache = scheme.get("kv_cache_scheme")
    if cache and scheme.get("quant_method") == "compressed-tensors":
        kind = None
        if isinstance(cache, Mapping):
            kind = (cache.get("num_bits"), cache.get("type"), cache.get("symmetric", True))
        if kind != (8, "float", True):
            raise UnsupportedError(f"kv_cache_scheme {cache!r} of the checkpoint is not supported", param="model")
        return not scheme.get("config_groups")
    return not scheme
