"""Which module has its test where it belongs: the tree of tests is the tree of `app/`.

A module is tested where it lives if `tests/a/b/test_c.py` stands for `app/a/b/c.py`, or a test under `tests/a/b/`
imports it, or such a one's neighbour in its folder does (as the parts of a dialect are tested through its endpoint).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.rooms import FILES, ROOT, module_of

# Tested from elsewhere, for the reason that stands there. The list may only shrink.
TESTED_ELSEWHERE = {
    "app.api.chat.blocks": "by both dialects of blocks: anthropic/test_messages, openai/test_responses",
    "app.api.pooling.classify": "by pooling/test_score, whose models it shares",
    "app.engine.executor.worker_group.device_index": "needs Ray and GPUs: executor/test_gpu_actors",
    "app.engine.executor.worker_group.worker_actor": "needs processes: executor/test_local_processes, test_ray_workers",
    "app.engine.kv_connector": "its table, by executors and schedulers that have a tier",
    "app.worker.pooling.pooler": "against sentence-transformers, with a worker around it",
    "app.worker.build": "by every worker: worker/test_worker, executor/test_in_process",
    "app.worker.build.generate": "by every worker: worker/test_worker, executor/test_in_process",
    "app.worker.build.parts": "by every worker: worker/test_worker, executor/test_in_process",
    "app.worker.build.pooling": "by every worker: worker/test_worker, worker/pooling/",
    "app.worker.heads.base": "by every worker: worker/test_worker",
    "app.worker.heads.pooling": "by worker/pooling/",
    "app.worker.heads.relay": "needs several stages: executor/test_parallel_tokens",
    "app.worker.heads.sampling": "by every worker: worker/test_worker",
}

TABLES = {"app.backends", "app.parser_tables", "app.models"}  # they stand above the rooms of what they name


@cache
def untested() -> frozenset[str]:
    """Modules with behaviour that no test reaches from the place that mirrors theirs."""
    modules = {module_of(path): path for path in FILES}
    tests = {path: _with_tables(_named(path), modules) for path in (ROOT / "tests").rglob("*.py")}
    covered = {name for name, path in modules.items() if _has_test(name, path, tests)}
    left = list(covered)
    while left:
        path = modules[left.pop()]
        named = _with_tables(_named(path), modules)
        neighbours = {name for name in named & modules.keys() if modules[name].parent == path.parent}
        left += neighbours - covered
        covered |= neighbours
    return frozenset(name for name, path in modules.items() if name not in covered and _has_behaviour(path))


def _with_tables(named: set[str], modules: dict[str, Path]) -> set[str]:
    """Who names a table chooses from it."""
    return named.union(*(_named(modules[table]) for table in named & TABLES))


def _has_test(name: str, path: Path, tests: dict[Path, set[str]]) -> bool:
    is_package = path.name == "__init__.py"
    place = ROOT / "tests" / path.parent.relative_to(ROOT / "app")
    own = place.parent / f"test_{place.name}.py" if is_package else place / f"test_{path.name}"
    return own.is_file() or any(name in named for test, named in tests.items() if test.is_relative_to(place))


def _named(path: Path) -> set[str]:
    """Modules that a file imports, or names in a string as tables and `python -m` do."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("app."):
            found.add(node.value.partition(":")[0])
    return found


def _has_behaviour(path: Path) -> bool:
    """Whether a function does anything: records, tables and contracts need no test."""
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_acts, node.body))
        for node in ast.walk(ast.parse(path.read_text()))
    )


def _acts(node: ast.stmt) -> bool:
    return not isinstance(node, ast.Raise | ast.Pass) and not (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
