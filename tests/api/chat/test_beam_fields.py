"""Which sampling parameters go with a beam search: a new one is refused until somebody says that it does."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic.fields import FieldInfo

from app.api.chat.beam_fields import check_beam_fields
from app.api.openai.completions import CompletionRequest
from app.api.server.app import create_app
from app.config.limits import RequestLimits
from app.errors import DeadlineError, UnsupportedError
from app.records.sampling_params import SamplingParams
from tests.api.conftest import ScriptedClient
from tests.api.test_guards import post, refused


class NewRequest(CompletionRequest):
    top_n_sigma: float = 0.0


def test_a_new_parameter_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SamplingParams.model_fields, "top_n_sigma", FieldInfo(default=0.0))
    check_beam_fields(NewRequest(prompt="x", use_beam_search=True, temperature=0.0))
    check_beam_fields(NewRequest(prompt="x", top_n_sigma=1.0))
    with pytest.raises(UnsupportedError) as caught:
        check_beam_fields(NewRequest(prompt="x", use_beam_search=True, temperature=0.0, top_n_sigma=1.0))
    assert caught.value.param == "top_n_sigma"


@pytest.mark.parametrize(
    ("path", "body", "num_tokens"),
    [
        ("/v1/completions", {"prompt": "a", "n": 4, "max_tokens": 26}, 104),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 26}, 104),
        ("/v1/completions", {"prompt": "a", "n": 1, "best_of": 4, "max_tokens": 26}, 104),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 4, "max_tokens": 26}, 104),
    ],
)
def test_beams_and_tokens_are_bounded_together(
    client: ScriptedClient, path: str, body: dict[str, Any], num_tokens: int
) -> None:
    """128 beams of 500 tokens had no end within 100 s, and nothing that bounded them."""
    app = create_app(client, RequestLimits(max_beam_tokens=100))
    error = refused(app, {**body, "use_beam_search": True, "temperature": 0.0}, path)
    assert (error["status"], error["param"]) == (400, "max_tokens")
    assert f"{num_tokens} tokens; at most 100" in error["message"]
    assert post(app, path, {**body, "use_beam_search": False}).status_code == 200


def test_a_search_as_large_as_the_limit_begins(client: ScriptedClient) -> None:
    body = {"prompt": "a", "n": 4, "max_tokens": 25, "use_beam_search": True, "temperature": 0.0}
    client.fail_once = DeadlineError("it has begun")
    response = post(create_app(client, RequestLimits(max_beam_tokens=100)), "/v1/completions", body)
    assert "it has begun" in response.text
