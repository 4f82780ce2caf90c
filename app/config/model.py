"""One served model's options: its name on the wire, its engine, its replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from app.backends import ADAPTER_RESOLVERS, STAT_LOGGERS
from app.config.autoscaling import AutoscalingConfig
from app.config.engine import EngineConfig, without_twins
from app.config.frozen import Frozen
from app.config.slo import SloConfig
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.registry import OneOf

AdapterName = Annotated[str, Field(min_length=1, max_length=256)]
BUILT_IN_MODEL, BUILT_IN_ADAPTER = "tiny-chat", "tiny-chat-pirate"
AdapterPath = Annotated[str, Field(pattern=f"^(/|{BUILT_IN_ADAPTER}$)", max_length=4096)]


_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
AdapterRepository = Annotated[
    str, Field(pattern=rf"^{_REPOSITORY}/(\*|{_REPOSITORY}(@[A-Za-z0-9][A-Za-z0-9_./-]{{0,95}})?)$")
]


class ModelConfig(Frozen):
    """One served model: its name on the wire, its engine, its replicas."""

    name: str = Field(min_length=1, description="Name in `model` of a request.")
    aliases: tuple[str, ...] = Field((), description="Further names for the same model.")
    adapters: dict[AdapterName, AdapterPath] = Field(
        {},
        description="Low-rank adapters (engine.enable_lora) by the name that requests give as `model`, each the "
        "absolute path of a directory as PEFT writes it, on every node. The built-in model is served with its own, "
        "tiny-chat-pirate, where none is named.",
        max_length=1024,
    )
    adapter_resolver: Annotated[str, OneOf(ADAPTER_RESOLVERS)] | None = Field(
        None,
        description="Look for an adapter where a request's `model` is no known name, and serve it from then on. "
        "`directory`: the one of that name in adapter_directory; `hub`: that of adapter_repositories, downloaded to "
        "adapter_directory; plugins. When not given, nothing is looked for.",
    )
    adapter_directory: str | None = Field(
        None,
        pattern="^/",
        max_length=4096,
        description="Directory that looked-up adapters lie under, links followed, on every node.",
    )
    adapter_repositories: tuple[AdapterRepository, ...] = Field(
        (),
        description="Repositories of a hub (HF_ENDPOINT, HF_TOKEN) that adapters are looked for in: organisation/name, "
        "organisation/name@revision, or organisation/* for all of an organisation's.",
        max_length=1024,
    )
    adapter_download_bytes: int = Field(
        20 << 30, ge=0, description="Most bytes that adapters of a hub take in adapter_directory; more are refused."
    )
    engine: EngineConfig = EngineConfig()
    num_replicas: int = Field(1, ge=1, description="Engine replicas, where their number stays the same.")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="Let the number of engine replicas follow the load, instead of num_replicas."
    )
    cpus_per_worker: float = Field(1.0, ge=0, description="Ray CPUs of each worker's bundle.")
    gpus_per_worker: float | None = Field(
        None, ge=0, description="Ray GPUs of each worker's bundle; 1 for device cuda, 0 for cpu."
    )
    replica_cpus: float = Field(0.1, ge=0, description="Ray CPUs of the engine replica's own bundle.")
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        "STRICT_PACK", description="How the replica's bundles are laid over nodes."
    )
    chat_template: str | None = Field(None, description="File with a Jinja chat template instead of the model's own.")
    tool_parser: Annotated[str, OneOf(TOOL_PARSERS, ("auto", "none"))] = Field(
        "auto",
        description="How the model writes tool calls (app/parsers). `auto`: by the chat template; `none`: it cannot.",
    )
    reasoning_parser: Annotated[str, OneOf(REASONING_PARSERS, ("auto", "none"))] = Field(
        "auto",
        description="How the model writes its reasoning (app/parsers). `auto`: by the chat template; `none`: "
        "reasoning stays in the content.",
    )
    slo: SloConfig = SloConfig()
    canary_interval_s: float = Field(
        5.0,
        ge=0,
        description="A replica that has given no output for so long asks itself for one token, so that /ready knows "
        "whether it still answers; 0: never.",
    )
    stat_loggers: tuple[Annotated[str, OneOf(STAT_LOGGERS)], ...] = Field(
        (),
        description="What is told each engine replica's figures beside Prometheus. `log`: a line in the replica's log; "
        "plugins.",
    )
    stat_logger_interval_s: float = Field(
        10.0, ge=1.0, description="How often: in this time a stat logger should be done with the figures before."
    )
    health_check_period_s: float = Field(2.0, gt=0, description="How often Serve asks a replica for its health.")
    graceful_shutdown_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Time a replica gets that is taken out of service: what runs there goes on elsewhere meanwhile, "
        "the last of it at two thirds of the time, also where it has to wait for another replica. A node's drain with "
        "more time than this starts the replacement first.",
    )

    @field_validator("stat_loggers")
    @classmethod
    def _once_each(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return without_twins(names)

    @property
    def served_adapters(self) -> dict[str, str]:
        """The adapters, or the built-in model's own."""
        is_built_in = self.engine.enable_lora and self.engine.model == BUILT_IN_MODEL
        return self.adapters or ({BUILT_IN_ADAPTER: BUILT_IN_ADAPTER} if is_built_in else {})

    @property
    def min_replicas(self) -> int:
        """Fewest engine replicas that serve at a time."""
        return self.num_replicas if self.autoscaling is None else max(1, self.autoscaling.min_replicas)

    @property
    def max_replicas(self) -> int:
        """Most of them."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.max_replicas

    @property
    def start_replicas(self) -> int:
        """Engine replicas that are started."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.start_replicas

    @property
    def may_sleep(self) -> bool:
        """True if there may be no replica."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def run_engine(self) -> EngineConfig:
        """The engine's options as replicas run them. A launch of all layers was not always the same to the bit where
        other processes computed on its GPU meanwhile, so where replicas share one there are none."""
        shares_gpu = self.gpus_per_worker is not None and self.gpus_per_worker < 1
        return self.engine.model_copy(update={"whole_steps": "off"}) if shares_gpu else self.engine

    @model_validator(mode="after")
    def _check_replicas(self) -> ModelConfig:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas: autoscaling chooses it; for the start there is autoscaling.initial_replicas"
            )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> ModelConfig:
        if self.adapters and not self.engine.enable_lora:
            raise ValueError("adapters: engine.enable_lora is off")
        if self.adapter_resolver is not None and not self.engine.enable_lora:
            raise ValueError("adapter_resolver: engine.enable_lora is off")
        if (self.adapter_resolver is None) != (self.adapter_directory is None):
            raise ValueError("adapter_resolver and adapter_directory: give both, or neither")
        if bool(self.adapter_repositories) != (self.adapter_resolver == "hub"):
            raise ValueError("adapter_repositories and adapter_resolver: hub: give both, or neither")
        return self

    @field_validator("gpus_per_worker")
    @classmethod
    def _check_gpus(cls, gpus: float | None, info: ValidationInfo) -> float | None:
        """Ranks of one worker group must not share a GPU: NCCL refuses that."""
        engine: EngineConfig | None = info.data.get("engine")
        if engine is not None and engine.world_size > 1 and gpus is not None and gpus % 1:
            raise ValueError(
                f"a fraction may put two of the {engine.world_size} workers (tensor_parallel_size x "
                "pipeline_parallel_size) on one GPU, which NCCL refuses: use a whole number"
            )
        return gpus
