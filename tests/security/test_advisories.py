"""The table of published weaknesses: every id that was collected stands in it, every test that it names is run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests import limits
from tools import security_docs
from tools.advisories import ADVISORIES

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"(CVE-20\d\d-\d{4,6}|PYSEC-20\d\d-\d+|GHSA(-[0-9a-z]{4}){3})")
# What was published about vLLM, SGLang, Ray, LiteLLM, their likes and the libraries in use, as collected up to
# November 2026. An id that comes to be known joins this list first.
COLLECTED = """
CVE-2023-48022 CVE-2023-48023 CVE-2023-6019 CVE-2023-6020 CVE-2023-6021 CVE-2024-11394 CVE-2024-50050 CVE-2025-10164
CVE-2025-1194 CVE-2025-14924 CVE-2025-1979 CVE-2025-2099 CVE-2025-23254 CVE-2025-24357 CVE-2025-25183 CVE-2025-29770
CVE-2025-29783 CVE-2025-30165 CVE-2025-30202 CVE-2025-32434 CVE-2025-32444 CVE-2025-46570 CVE-2025-46722 CVE-2025-48887
CVE-2025-48942 CVE-2025-48943 CVE-2025-48944 CVE-2025-48956 CVE-2025-59425 CVE-2025-61620 CVE-2025-62164 CVE-2025-62426
CVE-2025-6242 CVE-2025-62593 CVE-2025-71379 CVE-2026-105754 CVE-2026-105756 CVE-2026-105757 CVE-2026-105760
CVE-2026-105775 CVE-2026-105922 CVE-2026-110807 CVE-2026-110809 CVE-2026-111391 CVE-2026-111392 CVE-2026-112266
CVE-2026-115911 CVE-2026-115912 CVE-2026-115918 CVE-2026-116173 CVE-2026-116180 CVE-2026-15971 CVE-2026-22773
CVE-2026-22778 CVE-2026-22807 CVE-2026-24255 CVE-2026-24779 CVE-2026-27482 CVE-2026-27794 CVE-2026-3059 CVE-2026-3060
CVE-2026-3108 CVE-2026-34756 CVE-2026-37004 CVE-2026-3989 CVE-2026-41523 CVE-2026-42203 CVE-2026-42208 CVE-2026-5497
CVE-2026-55574 CVE-2026-56340 CVE-2026-5760 CVE-2026-7301 CVE-2026-73559 CVE-2026-86793 CVE-2026-94570 CVE-2026-94622
CVE-2026-94623 CVE-2026-94626 CVE-2026-9540 GHSA-46cm-pfwv-cgf8 GHSA-gx77-xgc2-4888 GHSA-rm76-4mrf-v9r8 PYSEC-2026-145
PYSEC-2026-2303 PYSEC-2026-4349 PYSEC-2026-4350 PYSEC-2026-4353
"""
NAMED = sorted({test for advisory in ADVISORIES for test in advisory.tests})
# The first release of a library in use that has none of its advisories in the table.
MENDED = {"ray": "2.54", "torch": "2.6", "transformers": "4.50"}


def test_every_id_stands_in_the_table_once() -> None:
    listed = [name for advisory in ADVISORIES for name in advisory.ids]
    assert sorted(listed) == sorted(COLLECTED.split())
    assert [name for name in listed if not ID.fullmatch(name)] == []


@pytest.mark.parametrize("advisory", ADVISORIES, ids=lambda advisory: advisory.ids[0])
def test_a_line_says_what_happened_and_what_is_done(advisory: object) -> None:
    assert all(getattr(advisory, name) for name in ("ids", "product", "there", "here"))


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert Path(file).name.startswith("test_")
    assert function.startswith("test_")
    assert function in functions(file)


@pytest.mark.slow  # it imports half of the suite
def test_named_tests_are_collected() -> None:
    """By pytest itself, those of acceptance too."""
    files = sorted({name.partition("::")[0] for name in NAMED})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    command += [f"tests/{file}" for file in files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limits.patience_s(), check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line.partition("[")[0] for line in done.stdout.splitlines()}
    assert {f"tests/{name}" for name in NAMED} - collected == set()


def test_the_page_is_fresh() -> None:
    fresh = security_docs.PAGE.read_text(encoding="utf-8") == security_docs.page()
    assert fresh, "docs/security.md is stale: run python -m tools.security_docs"


def test_the_page_is_read_in_ten_minutes() -> None:
    """At 240 words a minute; names of tests and ids are looked up, not read."""
    text = re.sub(r"`[^`]*`", "", security_docs.PAGE.read_text(encoding="utf-8"))
    assert len(re.findall(r"[A-Za-z']{2,}", ID.sub("", text))) < 2400


@pytest.mark.parametrize("name", MENDED)
def test_libraries_are_behind_what_was_mended(name: str) -> None:
    """What is installed, and the least that may be."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (found,) = [one for one in map(Requirement, wanted) if one.name == name]
    least = min(Version(spec.version) for spec in found.specifier if spec.operator in (">=", "=="))
    assert least >= Version(MENDED[name])
    assert Version(version(name)) >= Version(MENDED[name])
