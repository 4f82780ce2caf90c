"""Errors in `args:` of the Serve application: one line each, which says where and what."""

from __future__ import annotations

from typing import Any

import pytest

from app.deployments.serve.serve_args import parse_args
from app.errors import ConfigError


@pytest.mark.parametrize(
    ("args", "line", "param"),
    [
        (
            {"models": [{"name": "a", "engine": {"pipeline_parallel_size": 2, "pipeline_partition": [1, 2, 3]}}]},
            "args.models.0.engine: pipeline_partition names 3 stages, pipeline_parallel_size=2",
            "models.0.engine",
        ),
        (
            {"models": [{"name": "a", "engine": {"tensor_parallel_size": 2, "cuda_graph_prompt_tokens": "as_used"}}]},
            "args.models.0.engine: cuda_graph_prompt_tokens=as_used: not with several workers (tensor_parallel_size=2 "
            "x pipeline_parallel_size=1); use auto",
            "models.0.engine",
        ),
        (
            {"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]},
            "args: models: the name 'a' is used twice",
            None,
        ),
        (
            {"models": [{"name": ""}]},
            "args.models.0.name: String should have at least 1 character (given: '')",
            "models.0.name",
        ),
        (
            {"models": [{"name": "a", "engine": {"block_size": 0}}]},
            "args.models.0.engine.block_size: Input should be greater than or equal to 1 (given: 0)",
            "models.0.engine.block_size",
        ),
    ],
)
def test_the_error_is_one_line_that_names_the_option(args: dict[str, Any], line: str, param: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(args)
    assert (caught.value.message, caught.value.param) == (line, param)
