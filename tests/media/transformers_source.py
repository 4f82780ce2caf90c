"""Functions out of transformers' source, of modules that do not load where torchvision does not."""

from __future__ import annotations

import ast
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def functions_of(family: str, module: str, names: Collection[str], **space: Any) -> dict[str, Any]:
    """Functions and methods of a module of transformers' models by their names, run beside `space`; methods take a
    `self`."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "models" / family / f"{module}.py").read_text())
    found: list[ast.stmt] = []
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        found += [one for one in inner if isinstance(one, ast.FunctionDef) and one.name in names]
    exec(compile(ast.Module(found, []), "transformers", "exec"), space)
    return space
