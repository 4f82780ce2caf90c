"""What a request brings for a feature travels in one place, whoever the feature is."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from app.records.bad_words import BadWords
from app.records.request import EngineRequest
from app.records.sampling_params import SamplingParams
from app.structured.reasoning import ReasoningSpan
from tests.engine.core_driver import make_core


@dataclass(slots=True, frozen=True)
class Colour:
    """A record of a feature that this tree does not know."""

    name: str


def test_each_feature_finds_its_own_record() -> None:
    request = EngineRequest("r", [1], SamplingParams(), asks=(BadWords(((3, 4),)), Colour("red")))
    came = pickle.loads(pickle.dumps(request))
    assert came.asked(Colour) == Colour("red")
    assert came.asked(BadWords) == BadWords(((3, 4),))
    assert came.asked(ReasoningSpan) is None


def test_the_records_of_features_reach_the_workers() -> None:
    """All but that of the reasoning, which the matcher has taken in."""
    core = make_core()
    params = SamplingParams(max_tokens=2, seed=1)
    core.add_request(EngineRequest("r", [1, 2], params, asks=(ReasoningSpan((7,)), Colour("red"))))
    sent = []
    submit = core.executor.submit

    def watched(step_message: object) -> None:
        sent.extend(request.spec for request in step_message.new_requests)  # type: ignore[attr-defined]
        submit(step_message)  # type: ignore[arg-type]

    core.executor.submit = watched  # type: ignore[method-assign, assignment]
    while not sent:
        core.step()
    assert sent[0].asks == (Colour("red"),)
