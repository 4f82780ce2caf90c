"""What the interpreter cannot tell: every Triton kernel compiles for an H200, bf16 included, and spills little; and for
AMD's MI300, down to its binary. A few of the latter in every run, all of both in `make acceptance`, and with the oldest
Triton that pyproject.toml allows, as what one version compiles another may refuse."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT

OLDEST = ROOT / "build/oldest-triton"
AS_CONSTANTS = (type(None), bool, int, float)  # defaults that Triton 3.6, too, takes for constexpr where kernels call


def compiled(*arguments: str, **variables: str) -> int:
    """Compile ahead of time; returns how many kernels there were."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return int(done.stdout.splitlines()[-1].split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "gfx942"])
def test_every_kernel_compiles_ahead_of_time(gpu: str) -> None:
    assert compiled(gpu) >= 50


def test_some_kernels_compile_for_amd() -> None:
    assert compiled("gfx942", "3", "2") == 3


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="needs make oldest-triton")
def test_every_kernel_compiles_with_the_oldest_triton() -> None:
    assert compiled("h200", PYTHONPATH=f"{OLDEST}{os.pathsep}{ROOT}") >= 50


def wrong_defaults(source: str) -> list[str]:
    """Defaults of kernels' parameters that are no constants to every Triton: function and value."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    kernels = (one for one in functions if any("jit" in ast.unparse(mark) for mark in one.decorator_list))
    found = ((one.name, value) for one in kernels for value in [*one.args.defaults, *one.args.kw_defaults] if value)
    return [f"{name}: {ast.unparse(value)}" for name, value in found if not is_constant(value)]


def is_constant(value: ast.expr) -> bool:
    """True for numbers, truth values and None as they stand there."""
    try:
        return isinstance(ast.literal_eval(value), AS_CONSTANTS)
    except ValueError:
        return False


def test_defaults_of_kernels_are_constants_to_every_triton() -> None:
    """One that is text is none to Triton 3.6, where a kernel that calls another one leaves it out."""
    shown = "@gluon.jit\ndef rows(n, form: gl.constexpr = 'bf16', *, place=None, at=-1): ..."
    assert wrong_defaults(shown) == ["rows: 'bf16'"]
    paths = (ROOT / "app/kernels").rglob("*.py")
    assert {str(path): wrong for path in paths if (wrong := wrong_defaults(path.read_text()))} == {}
