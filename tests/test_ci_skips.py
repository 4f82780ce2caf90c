"""In CI no test is left out silently."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="this build of PyTorch has no oneDNN")
def test_fast_path(): ...

def test_page():
    pytest.skip("needs chromium and chromedriver")

@pytest.mark.skip(reason="needs 1 GPU(s), found 0")
def test_kernel(): ...

@pytest.mark.xfail
def test_known():
    assert False

def test_import():
    pytest.importorskip("no_such_module")
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"skipped": 4, "xfailed": 1}),
        ({"CI": "true"}, {"failed": 2, "errors": 1, "skipped": 1, "xfailed": 1}),
        ({"CI": "true", "CI_MAY_SKIP": "needs chromium"}, {"failed": 1, "errors": 1, "skipped": 2, "xfailed": 1}),
    ],
    ids=["at home", "in CI", "in CI without a browser"],
)
def test_a_missing_tool_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: dict[str, int]
) -> None:
    for name in ("CI", "CI_MAY_SKIP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pytester.makeconftest("from tests.conftest import pytest_runtest_makereport")
    pytester.makepyfile(TESTS)
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(**expected)
