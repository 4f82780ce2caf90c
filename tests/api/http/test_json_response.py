"""Responses are the JSON that Python's own parser reads, also where a part of them was written before."""

from __future__ import annotations

import json

from app.api.http.json_response import json_response, written


def test_a_response_and_a_part_that_was_written_before() -> None:
    logprobs = [
        {"token": "é\n", "logprob": -0.25, "bytes": [195, 169]},
        {"token": '"', "logprob": -1e-9, "bytes": None},
    ]
    response = json_response({"n": 1, "logprobs": written(logprobs)}, headers={"x-own": "yes"})
    assert json.loads(bytes(response.body)) == {"n": 1, "logprobs": logprobs}
    assert (response.media_type, response.headers["x-own"]) == ("application/json", "yes")
    assert response.headers["content-length"] == str(len(response.body))
