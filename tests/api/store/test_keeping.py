"""What is kept beside an answer."""

from __future__ import annotations

import pytest

from app.api.store.entries import StorageFullError
from app.api.store.keeping import is_kept
from tests.limits import run


def test_a_store_that_fails_costs_only_the_later_use(caplog: pytest.LogCaptureFixture) -> None:
    async def keep(error: Exception | None) -> None:
        if error is not None:
            raise error

    with caplog.at_level("WARNING", "manta.api"):
        assert run(is_kept("the answer a", keep(None)))
        assert not run(is_kept("the answer b", keep(StorageFullError("no room"))))
    assert [record.getMessage() for record in caplog.records] == ["the answer b is not kept: no room"]
    with pytest.raises(ZeroDivisionError):
        run(is_kept("the answer c", keep(ZeroDivisionError())))
