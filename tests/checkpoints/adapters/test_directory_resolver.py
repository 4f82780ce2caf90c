"""Names of adapters that are directories: no name leads out of the one that they lie in."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.backends import ADAPTER_RESOLVERS
from tests.adapters import write_adapter


def test_a_name_is_a_directory(tmp_path: Path) -> None:
    resolver = ADAPTER_RESOLVERS.load("directory")(tmp_path / "adapters")
    own = write_adapter(tmp_path / "adapters" / "sql-v1.2")
    assert resolver.find("sql-v1.2") == own
    (tmp_path / "adapters" / "empty").mkdir()
    assert [resolver.find(name) for name in ("empty", "sql", "adapter_config.json")] == [None, None, None]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../outside", "a/../../outside", "/etc", "inner/one", ".hidden", "a\0b", "a\n", "a" * 256, "é"],
)
def test_no_other_name_is_looked_for(tmp_path: Path, name: str) -> None:
    root = tmp_path / "adapters"
    for there in (tmp_path / "outside", root / "inner" / "one", root / ".hidden", root / "é"):
        write_adapter(there)
    assert ADAPTER_RESOLVERS.load("directory")(root).find(name) is None
