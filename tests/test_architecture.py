"""The style rules that are tests: layers, sizes, a torch-free host half, tables whose entries exist (design 3)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for path in (ROOT / "app").rglob("*.py") if "assets" not in path.parts)

# The longest prefix wins; a file may import from its own row only inside its own room, and from smaller rows
# (rooms of one row may know each other where the design lists them in one cell).
ROWS: dict[str, int] = {
    "app": 6,
    "app.errors": 0,
    "app.registry": 0,
    "app.backends": 0,
    "app.bounds": 0,
    "app.config": 0,
    "app.telemetry": 0,
    "app.kernels": 1,
    "app.engine": 2,
    "app.text": 2,
    "app.engine.distributed": 3,
    "app.engine.attention": 3,
    "app.engine.layers": 3,
    "app.engine.quantization": 3,
    "app.engine.models": 3,
    "app.engine.logits_processors": 3,
    "app.engine.pooling": 3,
    "app.engine.pooling.params": 2,
    "app.engine.pooling.info": 2,
    "app.engine.sampling": 3,
    "app.engine.row_feature": 3,
    "app.engine.to_device": 3,
    "app.engine.worker": 3,
    "app.engine.executor": 4,
    "app.engine.core": 4,
    "app.engine.async_engine": 4,
    "app.beams": 4,
    "app.offline": 6,
    "app.api": 5,
    "app.deployments": 6,
    "app.cli": 6,
}
HEAVY = {"torch", "transformers", "accelerate", "triton", "ray", "safetensors"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _row(module: str) -> int:
    while module not in ROWS:
        module = module.rpartition(".")[0]
    return ROWS[module]


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_point_down(path: Path) -> None:
    row = _row(_module(path))
    for name in _imports(path):
        if name == "app" or name.startswith("app."):
            assert _row(name) <= row, f"row {row} imports {name} of row {_row(name)}"
            assert not (row == 2 and _row(name) == 1), f"the host half imports the kernels: {name}"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_packages_stay_in_their_rooms(path: Path) -> None:
    module, tops = _module(path), {name.partition(".")[0] for name in _imports(path)}
    row = _row(module)
    if "triton" in tops:
        assert module.startswith("app.kernels"), "triton outside app/kernels"
    if "ray" in tops:
        assert row == 6 or module.startswith("app.engine.executor"), "ray outside the executor and the deployments"
    if row in (0, 2, 5):
        assert not tops & HEAVY, f"{module} imports {tops & HEAVY}"


def _functions(path: Path) -> list[tuple[str, int, bool]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            found.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1, kernel))
    return found


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_sizes(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines: two nouns in one file?"
    for name, length, kernel in _functions(path):
        limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
        assert length <= limit, f"{name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_every_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "no module docstring"


def test_host_half_runs_without_torch() -> None:
    """Import every torch-free module in a process where torch, transformers and Ray cannot be imported (I8)."""
    modules = [_module(path) for path in FILES if _row(_module(path)) in (0, 2, 5)]
    blocked = ", ".join(f"{name!r}: None" for name in sorted(HEAVY))
    code = f"import sys; sys.modules.update({{{blocked}}})\nimport importlib\n" + "".join(
        f"importlib.import_module({module!r})\n" for module in modules
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _tables() -> list[tuple[str, str]]:
    """(module, target) of every `Registry(kind, {...})` written in app/."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Registry") and len(node.args) == 2:
                assert isinstance(node.args[1], ast.Dict), f"{path}: a table is a literal dict"
                found += [(_module(path), value.value) for value in node.args[1].values]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("module", "target"), _tables(), ids=lambda value: value)
def test_every_table_entry_exists(module: str, target: str) -> None:
    name, _, attribute = target.partition(":")
    path = ROOT / Path(*name.split("."))
    source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    assert source.is_file(), f"{module}: {target} does not exist"
    names = {
        *(node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)),
        *(
            ast.unparse(t)
            for node in ast.parse(source.read_text()).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for t in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ),
    }
    assert attribute in names, f"{module}: {name} has no {attribute}"
