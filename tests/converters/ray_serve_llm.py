"""Reads arguments of Ray Serve LLM (JSON on standard input) by Ray's own classes, and prints what they made of them.

Ray's module imports packages that only cloud storage and vLLM need; where they are missing, empty ones stand for them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from typing import Any

OTHERS = ("pyarrow", "boto3", "botocore", "google", "vllm")


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes last, so that what is installed is what is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in OTHERS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> None:
    sys.meta_path.append(_Finder())
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig, ModelLoadingConfig
    from ray.llm._internal.serve.core.ingress.builder import LLMServingArgs

    serving = LLMServingArgs.model_validate(json.loads(sys.stdin.read()))
    fields = {
        "LLMServingArgs": sorted(LLMServingArgs.model_fields),
        "LLMConfig": sorted(LLMConfig.model_fields),
        "ModelLoadingConfig": sorted(ModelLoadingConfig.model_fields),
    }
    print(json.dumps({"models": [config.model_id for config in serving.llm_configs], "fields": fields}))


if __name__ == "__main__":
    main()
