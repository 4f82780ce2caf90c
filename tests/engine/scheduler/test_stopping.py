"""When tokens end a request."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.scheduler.stopping import check_stop
from app.records.request import EngineRequest
from app.records.request_state import Request
from app.records.sampling_params import SamplingParams

EOS, STOP = 2, 9


def stopped(output: list[int], *, max_total: int = 100, **params: Any) -> tuple[str, int | None] | None:
    sampling = SamplingParams(**params)
    tokens = [1, 1, 1, *output]
    return check_stop(
        Request(EngineRequest("r", [], sampling), tokens, 3, max_total, (EOS,), frozenset(sampling.stop_token_ids), b"")
    )


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([5], {}, None),
        ([EOS], {}, ("stop", None)),
        ([EOS], {"ignore_eos": True}, None),
        ([STOP], {}, None),
        ([STOP], {"stop_token_ids": (STOP,)}, ("stop", STOP)),
        ([EOS], {"ignore_eos": True, "stop_token_ids": (EOS,)}, ("stop", EOS)),
        ([5, EOS], {"min_tokens": 3}, None),
        ([5, STOP], {"min_tokens": 3, "stop_token_ids": (STOP,)}, None),
        ([5, 5, EOS], {"min_tokens": 3}, ("stop", None)),
        ([5, 5], {"max_total": 5}, ("length", None)),
        ([5, EOS], {"max_total": 5}, ("stop", None)),
    ],
)
def test_check_stop(output: list[int], params: dict[str, Any], expected: tuple[str, int | None] | None) -> None:
    assert stopped(output, **params) == expected
