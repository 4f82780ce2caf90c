"""Real workers on two Ray nodes of one placement group: stages on different nodes, tensor-parallel ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from app.checkpoints.model_info import ModelInfo
from app.config.engine import EngineConfig
from app.engine.core import EngineCore
from app.engine.executor.ray_workers import RayWorkersExecutor
from app.records.sampling_params import SamplingParams
from tests.engine.core_driver import KEY, make_request, run
from tests.tiny_models import hf_greedy, hf_model, tiny_model

pytestmark = pytest.mark.slow
PROMPTS = [[5, 9, 30, 7], list(range(40, 90)), [3]]
MAX_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def two_nodes() -> Iterator[None]:
    """A head without CPUs, where this process is, and two nodes of two CPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[3])}},
    )
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.parametrize("transport", ["socket", "compiled_graph"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 2), (4, 1)])
def test_tokens_of_transformers_over_two_nodes(tp: int, pp: int, transport: str) -> None:
    directory = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = EngineConfig(
        model=str(directory),
        device="cpu",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        step_transport=transport,
        num_blocks=64,
        num_threads=1,
        max_num_batched_tokens=24,
    )
    executor = RayWorkersExecutor(config)
    core = EngineCore(config, ModelInfo.from_directory(str(directory)), executor, KEY)
    try:
        core.start()
        assert executor._placement is not None
        nodes = executor._placement.node_of
        assert len(set(nodes)) == 2
        if pp == 2:
            assert nodes[0] == nodes[1] != nodes[2] == nodes[3], "a tensor-parallel group lies on two nodes"
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS, ignore_eos=True)
        options = params.model_dump(exclude_unset=True)
        results = run(core, [make_request(f"{i}", prompt, **options) for i, prompt in enumerate(PROMPTS)])
    finally:
        core.shutdown()
    model = hf_model(directory)
    assert [results.tokens[f"{i}"] for i in range(3)] == [hf_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
