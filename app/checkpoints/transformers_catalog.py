"""Finds what the installed transformers has for an architecture in its source files: no torch, no import of it (I8).

A model class names itself in `modeling_auto.py`, says in its modeling file whether its attention goes through
transformers' attention interface and whether it keeps a state of its own; its configuration class says how the family
calls the sizes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_TABLES = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)


@dataclass(slots=True, frozen=True)
class CatalogEntry:
    """One architecture of transformers."""

    architecture: str
    model_types: tuple[str, ...]
    takes_attention: bool  # through the attention interface
    keeps_state: bool  # recurrent, or a convolution's: more than keys and values of tokens
    is_encoder: bool  # which decodes only where its configuration says so (BERT and its kin)

    @property
    def may_run(self) -> bool:
        """True if its modules may take our attention."""
        return self.takes_attention and not self.keeps_state and not self.is_encoder


@cache
def causal_architectures() -> Mapping[str, tuple[str, ...]]:
    """Model types by the architecture that is their language model."""
    found: dict[str, tuple[str, ...]] = {}
    for table in _TABLES:
        for model_type, names in _table("modeling_auto.py", table).items():
            for name in (names,) if isinstance(names, str) else names:
                found[name] = (*found.get(name, ()), model_type)
    return found


@cache
def entry_of(architecture: str) -> CatalogEntry | None:
    """The entry of an architecture; None where transformers has no such language model."""
    model_types = causal_architectures().get(architecture)
    if model_types is None:
        return None
    source = next(
        (text for kind in model_types for text in _sources(kind, "modeling") if _defines(text, architecture)), ""
    )
    return CatalogEntry(
        architecture,
        model_types,
        takes_attention="_supports_attention_backend = True" in source,
        keeps_state="_is_stateful = True" in source,
        is_encoder="config.is_decoder" in source and "encoder_hidden_states" in source,
    )


@cache
def size_names(model_type: str) -> Mapping[str, str]:
    """Returns what the family calls a size of config.json, by its common name."""
    for text in _sources(model_type, "configuration"):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                values = _assigned(node)
                if values.get("model_type") == model_type:
                    names = values.get("attribute_map")
                    return names if isinstance(names, dict) else {}
    return {}


def _defines(text: str, architecture: str) -> bool:
    return re.search(rf"^class {architecture}\(", text, re.MULTILINE) is not None


def _assigned(node: ast.ClassDef) -> dict[str, Any]:
    """The literal values that a class gives its attributes."""
    found: dict[str, Any] = {}
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            try:
                found[line.targets[0].id] = ast.literal_eval(line.value)
            except ValueError:
                continue
    return found


@cache
def _models() -> Path:
    spec = find_spec("transformers")
    assert spec is not None, "transformers is a requirement"
    assert spec.origin is not None, "transformers is a package"
    return Path(spec.origin).parent / "models"


def _sources(model_type: str, kind: str) -> list[str]:
    """The modeling or configuration files of a model type."""
    folder = _folders().get(model_type, model_type.replace("-", "_"))
    return [path.read_text(encoding="utf-8") for path in sorted((_models() / folder).glob(f"{kind}_*.py"))]


@cache
def _folders() -> Mapping[str, str]:
    """Folders of model types that are not called like them."""
    return _table("auto_mappings.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME") or _table(
        "configuration_auto.py", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"
    )


def _table(file: str, name: str) -> dict[str, Any]:
    """A table of the auto classes: a literal, or an OrderedDict of pairs."""
    path = _models() / "auto" / file
    if not path.is_file():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) and target.id == name:
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            return dict(ast.literal_eval(value)) if value is not None else {}
    return {}
