"""The policy in the form in which Ray Serve calls it: its contexts, its wrapper, its way to the controller."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve._private.config import DeploymentConfig, ReplicaConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config, _apply_autoscaling_config
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from app.config.autoscaling import AutoscalingConfig
from app.config.model import ModelConfig
from app.config.serve import ServeConfig
from app.deployments.app import _front_replicas
from app.deployments.autoscaling import POLICY_FUNCTION
from app.deployments.autoscaling.figures import STALE_S, engine_figures, ingress_figures
from app.deployments.autoscaling.serve_policy import engine_config, front_config
from app.records.stats import EngineStats

ENGINE = DeploymentID("Engine-m", "manta")
INGRESS = DeploymentID("Ingress", "manta")
IDLE = {"arrived_prefill_s": 0.0, "queued_prefill_s": 0.0, "decode_step_s": 0.0, "kv_share": 0.0, "num_requests": 0.0}


def test_a_changed_configuration_keeps_the_replicas_that_run() -> None:
    """Serve's own code is the judge. A number to start with makes it stop all others at every deploy."""

    def deployed(num_running: int, **options: Any) -> int:
        scaling = AutoscalingConfig(min_replicas=1, max_replicas=8, **options)
        config = DeploymentConfig(autoscaling_config=engine_config(ModelConfig(name="m", autoscaling=scaling), scaling))
        info = DeploymentInfo(config, ReplicaConfig.create(lambda: None), 0, "job", "1")
        state = DeploymentAutoscalingState(ENGINE)
        return state.register(info, num_running)

    assert deployed(-1) == 1  # what Serve has of a deployment that is new
    assert deployed(5) == 5
    assert deployed(-1, initial_replicas=3) == 3
    assert deployed(5, initial_replicas=3) == 3  # as docs/autoscaling.md says


class Controller:
    """Serve's controller, as far as one application's policy sees it, with a clock that the test turns."""

    def __init__(self, *, whole_application: bool = True, **options: Any) -> None:
        scaling = AutoscalingConfig(
            **{"min_replicas": 0, "max_replicas": 5, "up_delay_s": 2, "down_delay_s": 0, "utilization": 0.8, **options}
        )
        model = ModelConfig(name="m", autoscaling=scaling)
        self.configs = {ENGINE: engine_config(model, scaling), INGRESS: front_config(1)}
        policy = AutoscalingPolicy(policy_function=POLICY_FUNCTION)
        self.scale = _apply_app_level_autoscaling_config(policy.get_policy())
        own = self.configs[ENGINE].policy
        self.scale_alone = _apply_autoscaling_config(own.get_policy()(**own.policy_kwargs))
        self.whole_application = whole_application
        self.now_s = 1_000_000.0
        self.target = scaling.start_replicas
        self.engines: dict[str, dict[str, float]] = {}  # what running replicas report now; nothing: they are silent
        self.waiting: Mapping[str, tuple[int, int]] = {"m": (0, 0)}
        self.ingress_runs = True
        self.clocks: dict[str, float] = {}  # how far a replica's is ahead
        self._series: dict[str, dict[str, list[TimeStampedValue]]] = {}
        self._states: dict[DeploymentID, dict[str, Any]] = {}

    def run(self, seconds: float) -> list[int]:
        """The targets of each second; the controller asks more often, and replicas report once a second."""
        targets = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self._report()
            for _ in range(3):
                self._tick()
                self.now_s += 0.1
            self.now_s -= 0.3
            targets.append(self.target)
        return targets

    def restart(self) -> None:
        """Serve remembers targets, and neither metrics nor what a policy had to remember."""
        self._series, self._states = {}, {}

    def _report(self) -> None:
        said = {**self.engines, "ingress": ingress_figures(self.waiting) if self.ingress_runs else {}}
        for name, figures in said.items():
            at = self.now_s + self.clocks.get(name, 0.0)
            for figure, value in figures.items():
                series = self._series.setdefault(name, {}).setdefault(figure, [])
                series.append(TimeStampedValue(at, value))
                del series[:-10]

    def _tick(self) -> None:
        contexts = {ENGINE: self._context(ENGINE, list(self.engines), self.target)}
        contexts[INGRESS] = self._context(INGRESS, ["ingress"], 1)
        if self.whole_application:
            decisions, self._states = self.scale(contexts)
            assert set(decisions) == {ENGINE}
            self.target = decisions[ENGINE]
        else:
            self.target, self._states[ENGINE] = self.scale_alone(contexts[ENGINE])

    def _context(self, deployment: DeploymentID, names: list[str], target: int) -> AutoscalingContext:
        replicas = [ReplicaID(name, deployment) for name in names]
        raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
        for replica in replicas:
            for figure, series in self._series.get(replica.unique_id, {}).items():
                raw.setdefault(figure, {})[replica] = series
        config = self.configs[deployment]
        return AutoscalingContext(
            deployment_id=deployment,
            deployment_name=deployment.name,
            app_name="manta",
            current_num_replicas=len(replicas),
            target_num_replicas=target,
            running_replicas=replicas,
            total_num_requests=0.0,
            total_queued_requests=0.0,
            aggregated_metrics=None,
            raw_metrics=raw,
            capacity_adjusted_min_replicas=config.min_replicas,
            capacity_adjusted_max_replicas=config.max_replicas,
            policy_state=dict(self._states.get(deployment, {})),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now_s,
            config=config,
        )


def feed(controller: Controller, names: str, work: float, seconds: int) -> list[int]:
    """The targets while each replica of `names` is given `work` seconds of prefill a second."""
    targets = []
    for second in range(seconds):
        busy = {**IDLE, "arrived_prefill_s": 1e6 + work * second, "num_requests": 9.0}
        controller.engines = dict.fromkeys(names, busy)
        targets += controller.run(1)
    return targets


def test_who_waits_in_the_ingress_wakes_the_model_at_once_and_for_as_many_replicas_as_they_fill() -> None:
    controller = Controller()
    assert set(controller.run(5)) == {0}
    controller.waiting = {"m": (300, 9000), "another": (1000, 1)}
    assert controller.run(1) == [3], "128 requests run at once"


def test_a_model_that_sleeps_is_looked_at_whenever_serve_asks() -> None:
    controller = Controller()
    controller.run(3)
    controller.waiting = {"m": (1, 30)}
    controller.now_s += 0.25
    controller._report()
    controller._tick()
    assert controller.target == 1


def test_ingresses_tell_sooner_who_waits_where_a_model_may_sleep() -> None:
    assert front_config(2).metrics_interval_s == 1.0
    assert front_config(2, models_sleep=True).metrics_interval_s == 0.25
    for least, interval_s in ((0, 0.25), (1, 1.0)):
        scaled = ModelConfig(name="m", autoscaling=AutoscalingConfig(min_replicas=least, max_replicas=2))
        (config,) = _front_replicas(ServeConfig(models=[scaled])).values()
        assert config.metrics_interval_s == interval_s


def test_an_idle_model_sleeps_and_one_that_may_not_does_not() -> None:
    for least, last in ((0, 0), (1, 1)):
        options = {"idle_s": 20} if not least else {}
        controller = Controller(min_replicas=least, initial_replicas=1, down_interval_s=5, **options)
        controller.engines = {"a": IDLE}
        assert set(controller.run(18)) == {1}
        assert controller.run(10)[-1] == last


def test_the_rate_of_what_arrives_counts_not_what_was_ever_done() -> None:
    controller = Controller(min_replicas=1, initial_replicas=2)
    for name in "ab":
        controller.engines[name] = {**IDLE, "arrived_prefill_s": 1e6}
    assert set(controller.run(20)) == {2}
    assert feed(controller, "ab", 1.5, 12)[-1] == 4


def test_a_silent_replica_or_ingress_holds_the_fleet() -> None:
    for silent in ("replica", "ingress"):
        controller = Controller(min_replicas=1, initial_replicas=3, down_interval_s=2 * STALE_S)
        controller.engines = {name: dict(IDLE) for name in "abc"}
        controller.run(3)
        if silent == "replica":
            controller.engines["c"] = {}
        else:
            controller.ingress_runs = False
        assert set(controller.run(120)) == {3}


def test_a_replica_whose_clock_is_wrong_is_heard_all_the_same() -> None:
    controller = Controller(min_replicas=1, initial_replicas=2, down_interval_s=5)
    controller.clocks = {"a": -7200.0, "b": 7200.0}
    controller.engines = {name: dict(IDLE) for name in "ab"}
    assert controller.run(30)[-1] == 1


def test_a_restarted_controller_holds_until_it_has_seen_enough() -> None:
    controller = Controller(min_replicas=1, initial_replicas=3, down_interval_s=20)
    controller.engines = {name: dict(IDLE) for name in "abc"}
    controller.run(10)
    controller.restart()
    assert set(controller.run(19)) == {3}
    assert controller.run(5)[-1] == 2


def test_without_the_applications_policy_replicas_follow_the_load_and_the_last_one_stays() -> None:
    controller = Controller(whole_application=False, idle_s=5, down_interval_s=5)
    assert controller.run(1) == [1], "nobody could wake it"
    feed(controller, "a", 2.0, 12)
    assert controller.target >= 3
    controller.engines = {name: dict(IDLE) for name in "abc"}
    assert controller.run(60)[-1] == 1


def test_the_policies_reach_a_controller_that_cannot_import_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    alone = cloudpickle.dumps(controller.configs[ENGINE].policy.get_policy())
    whole = AutoscalingPolicy(policy_function=POLICY_FUNCTION).get_serialized_policy_def()
    for name in [name for name in sys.modules if name == "app" or name.startswith("app.")]:
        monkeypatch.setitem(sys.modules, name, None)
    contexts = {ENGINE: controller._context(ENGINE, [], 0), INGRESS: controller._context(INGRESS, ["ingress"], 1)}
    decisions, _ = cloudpickle.loads(whole)(contexts)
    assert decisions == {ENGINE: 0}
    policy = cloudpickle.loads(alone)(**controller.configs[ENGINE].policy.policy_kwargs)
    assert policy(contexts[ENGINE])[0] == 1


def test_an_engine_counts_what_clients_wait_for() -> None:
    zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    stats = EngineStats(
        **{
            **zeros,
            **{"num_running": 2, "num_blocks": 10, "num_free_blocks": 4, "outstanding_decode_tokens": 5},
            **{"outstanding_prefill_tokens": 1000, "prefill_token_s": 1e-3, "prefill_s_total": 7.0},
            "decode_step_s": 0.02,
        }
    )
    assert engine_figures(stats, 3, 1.5) == {
        "arrived_prefill_s": pytest.approx(8.0),
        "queued_prefill_s": pytest.approx(1.0),
        "decode_step_s": 0.02,
        "kv_share": pytest.approx(0.6),
        "num_requests": 3.0,
        "prefill_token_s": 1e-3,
        "start_s": 1.5,
    }
