"""The style rules that are tests: layers, sizes, a torch-free host half, tables whose entries exist (design 3)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.mirror import TESTED_ELSEWHERE, untested
from tests.rooms import FILES, ROOT, imports_of, may_import, module_of, room_of, row_of

HEAVY = {"torch", "transformers", "accelerate", "triton", "ray", "safetensors"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 8  # of a function on the host, without `self`
MOST_FLAT_FILES = 6  # of rooms that consist of folders


@dataclass(slots=True, frozen=True)
class Function:
    """A function of `app/`, as far as a rule asks."""

    name: str
    lines: int
    is_kernel: bool
    num_parameters: int


@dataclass(slots=True, frozen=True)
class Source:
    """What the rules ask of a file."""

    lines: int
    is_described: bool
    functions: tuple[Function, ...]
    entries: tuple[str, ...]  # targets of each `Registry(kind, {...})` that it writes


@cache
def _source(path: Path) -> Source:
    text = path.read_text()
    tree, functions, entries = ast.parse(text), [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append(Function(node.name, lines, _is_kernel(node), _num_parameters(node)))
        elif isinstance(node, ast.Call) and _is_registry(node.func) and len(node.args) >= 2:
            assert isinstance(node.args[1], ast.Dict), f"{path}: a table is a literal dict"
            entries += [value.value for value in node.args[1].values]  # type: ignore[attr-defined]
    is_described = not tree.body or bool(ast.get_docstring(tree))
    return Source(len(text.splitlines()), is_described, tuple(functions), tuple(entries))


def _is_registry(function: ast.expr) -> bool:
    kind = function.value if isinstance(function, ast.Subscript) else function
    return isinstance(kind, ast.Name) and kind.id == "Registry"


def test_imports_point_to_rooms_above() -> None:
    wrong = [
        f"{module}: {room_of(module)} does not know {room_of(name)} ({name})"
        for path in FILES
        for module in (module_of(path),)
        for name in imports_of(path)
        if (name == "app" or name.startswith("app.")) and not may_import(module, name)
    ]
    assert not wrong


def test_no_folder_has_two_ways_to_another() -> None:
    """Folders that import each other are one room in two places, whatever the plan says."""
    ways: set[tuple[Path, Path]] = set()
    folders = {module_of(path): path.parent for path in FILES}
    for path in FILES:
        for name in imports_of(path) & folders.keys():
            ways.update(_folders_apart(path.parent, folders[name]))
    both = {(str(one), str(other)) for one, other in ways if (other, one) in ways and one < other}
    assert not both


def _folders_apart(one: Path, other: Path) -> Iterator[tuple[Path, Path]]:
    """The two folders and those around them, up to where they stand side by side in one folder."""
    ours = [one.relative_to(ROOT), *one.relative_to(ROOT).parents]
    theirs = [other.relative_to(ROOT), *other.relative_to(ROOT).parents]
    for here in ours:
        for there in theirs:
            if here not in theirs and there not in ours:
                yield here, there


def test_packages_stay_in_their_rooms() -> None:
    for path in FILES:
        module, tops = module_of(path), {name.partition(".")[0] for name in imports_of(path)}
        row = row_of(module)
        if "triton" in tops:
            assert module.startswith("app.kernels"), f"{module}: triton outside app/kernels"
        if "ray" in tops:
            is_allowed = row == 6 or module.startswith("app.engine.executor")
            assert is_allowed, f"{module}: ray outside the executor and the deployments"
        if row in (0, 2, 5):
            assert not tops & HEAVY, f"{module} imports {tops & HEAVY}"


def test_sizes() -> None:
    for path in FILES:
        source = _source(path)
        assert source.lines <= MAX_FILE_LINES, f"{path}: {source.lines} lines: two nouns in one file?"
        for function in source.functions:
            limit = MAX_KERNEL_LINES if function.is_kernel else MAX_FUNCTION_LINES
            assert function.lines <= limit, f"{path}: {function.name} has {function.lines} lines"


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    args = node.args
    named = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"])) + (args.vararg is not None) + (args.kwarg is not None)


@pytest.mark.parametrize("room", ["api", "deployments", "engine"])
def test_a_room_s_listing_is_its_plan(room: str) -> None:
    flat = [path.name for path in FILES if path.parent == ROOT / "app" / room and path.name != "__init__.py"]
    assert len(flat) <= MOST_FLAT_FILES, flat


def test_host_functions_have_few_parameters() -> None:
    many = {
        f"{module_of(path)}.{function.name}"
        for path in FILES
        for function in _source(path).functions
        if not function.is_kernel and function.num_parameters > MAX_PARAMETERS
    }
    assert not many, "records that mean something take their place"


def test_every_file_says_what_it_is() -> None:
    silent = [module_of(path) for path in FILES if not _source(path).is_described]
    assert not silent, "no module docstring"


def test_host_half_runs_without_torch() -> None:
    """Import every torch-free module in a process where torch, transformers and Ray cannot be imported (I8)."""
    modules = [module_of(path) for path in FILES if row_of(module_of(path)) in (0, 2, 5)]
    blocked = ", ".join(f"{name!r}: None" for name in sorted(HEAVY))
    code = f"import sys; sys.modules.update({{{blocked}}})\nimport importlib\n" + "".join(
        f"importlib.import_module({module!r})\n" for module in modules
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_table_entry_exists() -> None:
    for path in FILES:
        for target in _source(path).entries:
            name, _, attribute = target.partition(":")
            names = _names(name)
            assert names, f"{path}: {target} does not exist"
            assert attribute in names, f"{path}: {name} has no {attribute}"


@cache
def _names(module: str) -> frozenset[str]:
    """Classes, functions and variables of a module; none where there is no such module."""
    path = ROOT / Path(*module.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not source.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(map(ast.unparse, node.targets))
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return frozenset(names)


def test_tests_are_where_the_modules_are() -> None:
    """Each module is tested at the place that mirrors its own; the exceptions are named, and only as long as needed."""
    new, mended = untested() - TESTED_ELSEWHERE.keys(), TESTED_ELSEWHERE.keys() - untested()
    assert not new, f"no test at the place that mirrors theirs: {sorted(new)}"
    assert not mended, f"have a test by now: take them off the list: {sorted(mended)}"
