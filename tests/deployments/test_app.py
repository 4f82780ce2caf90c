"""What `serve run` does with a configuration: the graph's shape, and errors that name the option."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ray import serve

from app.deployments.app import build
from app.deployments.autoscaling import POLICY_FUNCTION
from app.errors import ConfigError
from benchmarks.serve_process import ROOT

CONFIGS = sorted((ROOT / "configs/serve").glob("*.yaml"))


def args(**changes: Any) -> dict[str, Any]:
    return {"models": [{"name": "tiny-chat"}], **changes}


def scaled(**autoscaling: Any) -> dict[str, Any]:
    return {"models": [{"name": "a", "autoscaling": autoscaling}]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"models": []}, r"args\.models: "),
        ({"models": [{"name": "a", "engine": {"max_num_seq": 3}}]}, r"args\.models\.0\.engine\.max_num_seq: no such"),
        ({"models": [{"name": "a", "engine": {"max_num_seq": 3}}]}, "did you mean max_num_seqs"),
        ({"models": [{"name": "a", "engine": {"block_size": 0}}]}, r"args\.models\.0\.engine\.block_size: .*given: 0"),
        ({"models": [{}]}, r"args\.models\.0\.name: this option is required"),
        ({"models": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}, "the name 'a' is used twice"),
        (
            {"models": [{"name": "a", "gpus_per_worker": 0.5, "engine": {"tensor_parallel_size": 2}}]},
            r"args\.models\.0\.gpus_per_worker: .*two of the 2 workers .* on one GPU.*whole number \(given: 0\.5\)",
        ),
        (
            {"models": [{"name": "a", "gpus_per_worker": 1.5, "engine": {"pipeline_parallel_size": 2}}]},
            r"args\.models\.0\.gpus_per_worker: ",
        ),
        (
            scaled(min_replicas=3, max_replicas=2),
            r"args\.models\.0\.autoscaling: min_replicas: 3 is more than max",
        ),
        (scaled(max_replicas=2, initial_replicas=0), r"autoscaling: initial_replicas: 0 is not within min_replicas=1"),
        (scaled(max_replicas=2, idle_s=60), r"autoscaling: idle_s: min_replicas=1 keeps a replica"),
        (scaled(max_replicas=2, floor_by_hour={"8": 3}), r"autoscaling: floor_by_hour: 3 from 8 o'clock"),
        (scaled(max_replicas=2, floor_by_hour={"24": 1}), r"autoscaling\.floor_by_hour\.24"),
        (
            scaled(max_replica=2),
            r"args\.models\.0\.autoscaling\.max_replica: no such option; did you mean max_replicas",
        ),
        (scaled(min_replicas=1), r"args\.models\.0\.autoscaling\.max_replicas: this option is required"),
        (
            {"models": [{"name": "a", "num_replicas": 2, "autoscaling": {"max_replicas": 2}}]},
            r"args\.models\.0: num_replicas: autoscaling chooses it",
        ),
        (args(ingress={"limits": {"max_body": 1}}), r"args\.ingress\.limits\.max_body: no such"),
        (args(router={"policy": "best"}), r"args\.router\.policy: unknown routing policy 'best'; known: least"),
        (args(modles=[]), r"args\.modles: no such option; did you mean models"),
    ],
)
def test_errors_name_the_option(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(bad)


def test_one_line_per_option() -> None:
    with pytest.raises(ConfigError) as error:
        build({"models": [{"name": "a", "engine": {"max_num_seq": 3, "block_size": "x"}}]})
    assert len(error.value.message.splitlines()) == 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations(path: Any) -> None:
    config = yaml.safe_load(path.read_text())
    (application,) = config["applications"]
    assert application["import_path"] == "app.deployments.app:build"
    assert build(application["args"])
    mode = config["controller_options"]["runtime_env"]["env_vars"]
    assert application["runtime_env"]["env_vars"] == mode
    assert mode["RAY_SERVE_ENABLE_HA_PROXY"] == mode["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert int(mode["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) >= 3600
    assert int(mode["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) >= 64 << 20
    assert all(isinstance(value, str) for value in mode.values())


def engine_deployment(application: serve.Application, model: str) -> serve.Deployment:
    """The deployment that the Ingress was bound to under the name of `model`."""
    engines = application._bound_deployment.init_args[2]
    return engines[model]._bound_deployment


@pytest.mark.parametrize("strategy", ["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"])
def test_placement_reaches_serve(strategy: str) -> None:
    """The group that Serve makes for a replica is the one that the configuration describes."""
    worker_group = {"device": "cuda", "tensor_parallel_size": 2}
    models = [{"name": "a", "placement_strategy": strategy, "engine": worker_group}, {"name": "b"}]
    application = build({"models": models})
    replica = engine_deployment(application, "a")._replica_config
    assert replica.placement_group_strategy == strategy
    assert replica.placement_group_bundles == [{"CPU": 0.1}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]
    assert engine_deployment(application, "b")._replica_config.placement_group_strategy == "STRICT_PACK"


def test_what_needs_no_room_is_replaced_by_what_is_there_already() -> None:
    """A changed configuration leaves no moment without an ingress, also where there is one only."""

    def surges(**ingress: float) -> list[int]:
        application = build({"models": [{"name": "a"}], "ingress": ingress})
        bound = application._bound_deployment
        deployments = [bound, bound.init_args[1]._bound_deployment, engine_deployment(application, "a")]
        return [deployment._deployment_config.max_surge_percent for deployment in deployments]

    assert surges() == [100, 100, 0]
    assert surges(num_cpus=1.0) == [0, 100, 0]


def test_replicas_that_follow_the_load_are_asked_of_serve_and_nobody_else_is_scaled() -> None:
    scaling = {"min_replicas": 0, "max_replicas": 4, "initial_replicas": 2, "floor_by_hour": {"8": 3}}
    models = [{"name": "a", "autoscaling": scaling, "slo": {"itl_s": 0.2}}, {"name": "b", "num_replicas": 2}]
    application = build({"models": models, "ingress": {"num_replicas": 3}})
    engine = engine_deployment(application, "a")._deployment_config.autoscaling_config
    assert (engine.min_replicas, engine.initial_replicas, engine.max_replicas) == (0, 2, 4)
    assert (engine.upscale_delay_s, engine.downscale_delay_s) == (0, 0), "the policy has delays of its own"
    policy = engine.policy.get_policy()(**engine.policy.policy_kwargs)
    assert (policy.settings.floors, policy.settings.itl_slo_s) == (((8, 3),), 0.2)
    ingress = application._bound_deployment._deployment_config.autoscaling_config
    assert (ingress.min_replicas, ingress.max_replicas) == (3, 3), "it reports who waits"
    fixed = engine_deployment(application, "b")._deployment_config
    assert (fixed.num_replicas, fixed.autoscaling_config) == (2, None)
    assert build(args())._bound_deployment._deployment_config.autoscaling_config is None


def test_the_shipped_autoscaling_names_the_policy_of_the_application() -> None:
    (application,) = yaml.safe_load((ROOT / "configs/serve/autoscaling.yaml").read_text())["applications"]
    assert application["autoscaling_policy"] == {"policy_function": POLICY_FUNCTION}
