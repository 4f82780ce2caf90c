"""Ray Serve's side of autoscaling: `scale` is the application's policy, and each engine deployment carries its options.

The YAML of the application names it (configs/serve/autoscaling.yaml):

    autoscaling_policy: {policy_function: "app.deployments.autoscaling.serve_policy:scale"}

Only a policy of the whole application sees the ingresses, which alone know who waits for a model without replicas:
Serve sees a channel as one endless request (I9), and where no replica is, nothing queues at a handle. Without it Serve
asks `ModelPolicy` of each deployment instead, which does the same but never lets the last replica go.

Serve's controller calls this ten times a second; a decision is made once in INTERVAL_S, but for a model that sleeps at
each call, so that it wakes at once. Of an exception Serve makes an
error in its log, and no decision.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import cloudpickle
from ray.serve.config import AutoscalingConfig as ServeAutoscalingConfig
from ray.serve.config import AutoscalingPolicy

import app.deployments.autoscaling as this_room
from app.deployments.autoscaling.figures import (
    INTERVAL_S,
    LOOK_BACK_S,
    STALE_S,
    WAITING,
    WAITING_TOKENS,
    WAKE_INTERVAL_S,
    Series,
    last,
    replica_load,
)
from app.deployments.autoscaling.policy import Fleet, Settings, State, decide

if TYPE_CHECKING:
    from app.config.autoscaling import AutoscalingConfig
    from app.config.model import ModelConfig

logger = logging.getLogger("ray.serve")  # the controller's

# The policy travels to the controller by value, as Serve does with the module that holds it, for this room as a whole:
# the controller may run where `app` cannot be imported.
cloudpickle.register_pickle_by_value(this_room)

Context = Any  # ray.serve.config.AutoscalingContext; Ray ships no usable types
Raw = Mapping[str, Mapping[Any, Series]]  # by name and replica


class Reports:
    """Tells which replicas have said something lately; `seen` is what the last decision left."""

    def __init__(self, now_s: float, seen: Mapping[str, tuple[float, float]]) -> None:
        self.seen: dict[str, tuple[float, float]] = {}
        self._now_s = now_s
        self._before = seen

    def fresh(self, ctx: Context) -> dict[str, dict[str, Series]]:
        """The series of each running replica of a deployment that still reports, by name."""
        raw: Raw = ctx.raw_metrics or {}
        found = {}
        for replica in ctx.running_replicas:
            series = {name: points for name, by_replica in raw.items() if (points := by_replica.get(replica))}
            if series and self._is_fresh(str(replica), max(points[-1].timestamp for points in series.values())):
                found[str(replica)] = series
        return found

    def _is_fresh(self, replica: str, newest: float) -> bool:
        before, since_s = self._before.get(replica, (None, self._now_s))
        if newest != before or since_s > self._now_s:  # a later one; or the controller's clock was set back
            since_s = self._now_s
        self.seen[replica] = newest, since_s
        return self._now_s - since_s < STALE_S


def scale(contexts: Mapping[Any, Context]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
    """Serve's policy of the application: how many replicas each deployment shall have, and what to remember."""
    models = {key: policy for key, ctx in contexts.items() if (policy := _model_policy(ctx)) is not None}
    fronts = {key: ctx for key, ctx in contexts.items() if key not in models}
    decisions, states = {}, {}
    for key, policy in models.items():
        decisions[key], states[key] = policy.decide(contexts[key], fronts)
    return decisions, states


class ModelPolicy:
    """One engine deployment's options, as Serve's policy of that deployment alone."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self.model = model
        floors = tuple((int(hour), int(replicas)) for hour, replicas in settings["floors"])
        self.settings = Settings(**{**settings, "floors": floors})

    def __call__(self, ctx: Context) -> tuple[int, dict[str, Any]]:
        """Serve asks it where the application has no policy."""
        awake = replace(self.settings, min_replicas=max(1, self.settings.min_replicas))
        if ctx.target_num_replicas == 0:
            logger.warning("model %s: without the application's autoscaling_policy, nobody could wake it", self.model)
        return self._decide(ctx, {}, awake)

    def decide(self, ctx: Context, fronts: Mapping[Any, Context]) -> tuple[int, dict[str, Any]]:
        """The decision with what the ingresses in `fronts` say."""
        return self._decide(ctx, fronts, self.settings)

    def _decide(self, ctx: Context, fronts: Mapping[Any, Context], settings: Settings) -> tuple[int, dict[str, Any]]:
        memory = ctx.policy_state
        now_s: float = ctx.current_time
        if memory.get("target") != 0 and 0 <= now_s - memory.get("decided_s", float("-inf")) < INTERVAL_S:
            return memory["target"], memory
        reports = Reports(now_s, memory.get("seen", {}))
        fleet = _fleet(ctx, fronts, self.model, reports)
        target, state = decide(settings, fleet, memory.get("state", State()))
        if target != fleet.target:
            logger.info("autoscaling of %s: %d replicas after %d; %s", self.model, target, fleet.target, _reason(fleet))
        return target, {"decided_s": now_s, "target": target, "seen": reports.seen, "state": state}


def engine_config(model: ModelConfig, options: AutoscalingConfig) -> ServeAutoscalingConfig:
    """Returns what an engine deployment is given. All damping is the policy's own, so Serve adds none.

    A number to start with is what Serve goes back to whenever the configuration has changed, however many replicas are
    busy: it gets one only where the operator has named it. Else it starts with the fewest, and keeps those that run.
    """
    names = set(type(options).model_fields) & set(Settings.__dataclass_fields__)
    settings = {name: getattr(options, name) for name in sorted(names)} | {
        "ttft_slo_s": model.slo.ttft_s,
        "itl_slo_s": model.slo.itl_s,
        "max_num_seqs": model.engine.max_num_seqs,
        "floors": sorted(options.floor_by_hour.items()),
    }
    return ServeAutoscalingConfig(
        min_replicas=options.min_replicas,
        initial_replicas=options.initial_replicas,
        max_replicas=options.max_replicas,
        policy=AutoscalingPolicy(
            policy_function=ModelPolicy, policy_kwargs={"model": model.name, "settings": settings}
        ),
        **_REPORTS,
    )


def front_config(num_replicas: int, models_sleep: bool = False) -> ServeAutoscalingConfig:
    """Returns what a deployment is given that only reports: its number of replicas stays the same. It reports soon who
    waits for a model that sleeps, if some do."""
    reports = _REPORTS | ({"metrics_interval_s": WAKE_INTERVAL_S} if models_sleep else {})
    return ServeAutoscalingConfig(
        min_replicas=num_replicas, initial_replicas=num_replicas, max_replicas=num_replicas, **reports
    )


_REPORTS: dict[str, Any] = {
    "metrics_interval_s": INTERVAL_S,
    "look_back_period_s": LOOK_BACK_S,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 0.0,
}


def _model_policy(ctx: Context) -> ModelPolicy | None:
    """The policy of an engine deployment; None for another one."""
    options = ctx.config.policy.policy_kwargs
    return ModelPolicy(**options) if options else None


def _fleet(ctx: Context, fronts: Mapping[Any, Context], model: str, reports: Reports) -> Fleet:
    loads = [load for series in reports.fresh(ctx).values() if (load := replica_load(series)) is not None]
    waiting = [series for front in fronts.values() for series in reports.fresh(front).values()]
    num_fronts = sum(len(front.running_replicas) for front in fronts.values())
    return Fleet(
        now_s=ctx.current_time,
        target=ctx.target_num_replicas,
        running=len(ctx.running_replicas),
        loads=tuple(loads),
        num_waiting=sum(last(series.get(WAITING + model, ())) for series in waiting),
        waiting_tokens=sum(last(series.get(WAITING_TOKENS + model, ())) for series in waiting),
        complete=len(loads) == len(ctx.running_replicas) and len(waiting) == num_fronts,
    )


def _reason(fleet: Fleet) -> str:
    def total(name: str) -> float:
        return float(sum(getattr(load, name) for load in fleet.loads))

    return (
        f"{fleet.running} run, {len(fleet.loads)} report: {total('num_requests'):g} requests, "
        f"{total('prefill_rate'):.2f} s of prefill a second, {total('queued_prefill_s'):.2f} s of it queued, "
        f"KV {total('kv_share'):.0%}; {fleet.num_waiting:g} requests wait for a replica"
    )
