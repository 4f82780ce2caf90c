"""The options of autoscaling; ModelConfig holds them (app/config/)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from app.config.frozen import Frozen


class AutoscalingConfig(Frozen):
    """Decides how many replicas a model has, by its load and its objectives (`slo`); see docs/autoscaling.md."""

    min_replicas: int = Field(1, ge=0, description="Fewest replicas; 0 lets the model sleep when nobody asks for it.")
    max_replicas: int = Field(ge=1, description="Most replicas.")
    initial_replicas: int | None = Field(
        None,
        ge=0,
        description="Replicas at the start, and again after each deploy of a changed configuration. When not given: "
        "min_replicas, and afterwards those that run.",
    )

    utilization: float = Field(
        0.6, gt=0, le=1, description="Share of a replica's time, and of its KV cache, that is planned with."
    )
    hysteresis: float = Field(
        0.8, gt=0, le=1, description="Scale down only where the rest would be used to less than this share of that."
    )
    up_delay_s: float = Field(5.0, ge=0, description="Scale up to what was needed for so long without a break.")
    down_interval_s: float = Field(60.0, gt=0, description="Scale down by one in so long.")
    down_delay_s: float = Field(
        300.0,
        ge=0,
        description="Scale down to what was enough for all of so long; below down_interval_s it changes nothing.",
    )
    idle_s: float = Field(
        300.0, gt=0, description="With min_replicas 0: the last replica goes after so long without a request."
    )
    floor_by_hour: dict[Annotated[int, Field(ge=0, le=23)], Annotated[int, Field(ge=0)]] = Field(
        {}, description="Fewest replicas from an hour of the day (UTC) until the next one named here, around midnight."
    )
    wake_wait_s: float = Field(
        120.0, gt=0, description="A request that comes while there is no replica waits for one, so long at most."
    )
    max_wake_waiting: int = Field(
        1024, ge=1, description="Prompts that may wait so in an ingress replica; beyond them there is a 429."
    )

    @property
    def start_replicas(self) -> int:
        """Replicas at the start."""
        return self.min_replicas if self.initial_replicas is None else self.initial_replicas

    @model_validator(mode="after")
    def _check(self) -> AutoscalingConfig:
        least, most = self.min_replicas, self.max_replicas
        if least > most:
            raise ValueError(f"min_replicas: {least} is more than max_replicas={most}")
        if not least <= self.start_replicas <= most:
            raise ValueError(f"initial_replicas: {self.start_replicas} is not within min_replicas={least} and {most}")
        for hour, replicas in self.floor_by_hour.items():
            if not least <= replicas <= most:
                raise ValueError(
                    f"floor_by_hour: {replicas} from {hour} o'clock is not within min_replicas={least} and "
                    f"max_replicas={most}"
                )
        if least and "idle_s" in self.model_fields_set:
            raise ValueError(f"idle_s: min_replicas={least} keeps a replica, so that none goes for want of requests")
        return self
