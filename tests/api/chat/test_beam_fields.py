"""Which sampling parameters go with a beam search: a new one is refused until somebody says that it does."""

from __future__ import annotations

import pytest
from pydantic.fields import FieldInfo

from app.api.chat.beam_fields import check_beam_fields
from app.api.openai.protocol import CompletionRequest
from app.engine.sampling_params import SamplingParams
from app.errors import UnsupportedError


class NewRequest(CompletionRequest):
    top_n_sigma: float = 0.0


def test_a_new_parameter_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SamplingParams.model_fields, "top_n_sigma", FieldInfo(default=0.0))
    check_beam_fields(NewRequest(prompt="x", use_beam_search=True, temperature=0.0))
    check_beam_fields(NewRequest(prompt="x", top_n_sigma=1.0))
    with pytest.raises(UnsupportedError) as caught:
        check_beam_fields(NewRequest(prompt="x", use_beam_search=True, temperature=0.0, top_n_sigma=1.0))
    assert caught.value.param == "top_n_sigma"
