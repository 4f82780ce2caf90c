"""Checks what `quantization_config` of a checkpoint may hold, whatever its method: fields have types, and errors
name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from app.errors import MantaError, UnsupportedError
from app.quantization.name_patterns import MOST_CHARS, check_pattern

_LARGEST = 1 << 31  # no count is as large
ROOT = "quantization_config"
_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error)


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Errors that a configuration or a tensor of another form than expected causes, as UnsupportedError that says
    where."""
    try:
        yield
    except MantaError:
        raise
    except _DAMAGE as error:
        what = f"{type(error).__name__}: {error}"
        raise UnsupportedError(f"{where} cannot be read as {ROOT} describes it ({what})", param="model") from error


def check_fields(config: Mapping[str, Any], path: str = ROOT) -> None:
    """UnsupportedError names a field, at any depth, that has another type than methods read, or a pattern that is
    none."""
    for key, value in config.items():
        place = f"{path}.{key}"
        if value is not None and key in _FIELDS:
            expected, holds = _FIELDS[key]
            if not holds(value):
                raise UnsupportedError(f"{place} is {value!r}, not {expected}", param="model")
            for pattern in _patterns(key, value):
                check_pattern(pattern, place)
        if isinstance(value, Mapping):
            check_fields(value, place)


def _patterns(key: str, value: Any) -> list[str]:
    if key in ("targets", "ignore", "exclude", "kv_cache_group", "layer_quant_config"):
        return [one.removeprefix("re:") for one in value if one.startswith("re:")]
    if key == "dynamic" and isinstance(value, Mapping):
        return [one.removeprefix("-:").removeprefix("+:") for one in value]
    return list(value) if key == "extra_config" else []


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (_is_number(value) and value in (0, 1))


def _is_size(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, list) and all(map(_is_number, value)))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(one) and one > 0 for one in value)


def _is_block(value: Any) -> bool:
    return _is_pair([int(one) for one in re.findall(r"\d+", value)] if _is_product(value) else value)


def _is_product(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value) is not None


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) and len(one) <= MOST_CHARS for one in value)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(one is None or isinstance(one, Mapping) for one in value.values())


def _are_levels(value: Any) -> bool:
    return _is_object(value) or (isinstance(value, list) and all(map(_is_object, value)))


def _are_objects(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values())


_Field = tuple[str, Callable[[Any], bool]]
_NUMBER: _Field = ("a whole number", _is_number)
_NAMES: _Field = (f"a list of names of at most {MOST_CHARS} characters", _are_names)
_FLAG: _Field = ("true or false", _is_flag)
_OBJECT: _Field = ("an object", _is_object)
_TABLE: _Field = ("an object of objects", _is_table)
_FIELDS: Mapping[str, _Field] = {
    **dict.fromkeys(("bits", "w_bit", "wbits", "num_bits", "q_group_size"), _NUMBER),
    "group_size": ("a whole number or several", _is_size),
    "activation_scale_ub": ("a number above 0", _is_bound),
    "weight_block_size": ("two sizes", _is_pair),
    "block_structure": ("two sizes, as 128x128", _is_block),
    **dict.fromkeys(("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules", "exclude"), _NAMES),
    **dict.fromkeys(("targets", "llm_int8_skip_modules", "kv_cache_group"), _NAMES),
    **dict.fromkeys(("symmetric", "sym", "zero_point", "desc_act", "is_marlin_format"), _FLAG),
    **dict.fromkeys(("load_in_4bit", "_load_in_4bit"), _FLAG),
    **dict.fromkeys(
        (
            "weights",
            "input_activations",
            "sparsity_config",
            "transform_config",
            "quantization",
            "export",
            "global_quant_config",
        ),
        _OBJECT,
    ),
    **dict.fromkeys(("extra_config", "quantized_layers"), _TABLE),
    **dict.fromkeys(("weight", "input_tensors"), ("an object or several", _are_levels)),
    **dict.fromkeys(("config_groups", "layer_quant_config"), ("an object of objects", _are_objects)),
    # Rules of GPTQModel; of compressed-tensors, when activations are quantized.
    "dynamic": ("an object of objects", lambda value: isinstance(value, bool | str) or _is_table(value)),
}
