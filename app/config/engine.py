"""Every option of Manta, declared once: type, unit, default and meaning.

YAML (`args:` of the Serve application), `LLM(...)` keywords and help texts all derive from these frozen
models; an unknown option is an error that names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from app.admin_config import AdminConfig
from app.admission_config import AdmissionConfig
from app.autoscaling_config import AutoscalingConfig
from app.backends import (
    ATTENTION_BACKENDS,
    EXECUTORS,
    EXTRA_LOGITS_PROCESSORS,
    KV_CONNECTORS,
    LOAD_FORMATS,
    OWN_PROCESS,
    PLATFORMS,
    QUANT_METHODS,
    STAT_LOGGERS,
    STEP_TRANSPORTS,
)
from app.bounds import MAX_TEXT_CHARS
from app.frozen import Frozen
from app.parser_tables import REASONING_PARSERS, TOOL_PARSERS
from app.registry import OneOf
from app.router_config import RouterConfig
from app.slo_config import SloConfig

# Environment variables for what does not belong in a file: API keys, separated by commas or spaces; a file of keys.
KEYS_VARIABLE = "MANTA_API_KEYS"
KEYS_FILE_VARIABLE = "MANTA_API_KEYS_FILE"


def _kv_cache_dtype(value: Any) -> Any:
    """Two spellings, one meaning."""
    return {"fp8_e4m3": "fp8", "int8": "int8_per_token_head"}.get(value, value) if isinstance(value, str) else value


def _without_twins(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of plugins, none of which may run twice."""
    if twins := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{min(twins)!r} is named twice")
    return names


class EngineConfig(Frozen):
    """One engine: a model, its KV cache, its scheduler and the workers that run it."""

    model: str = Field(
        "tiny-chat",
        description="Model directory (Hugging Face layout), the name of a built-in model, or organisation/name of a "
        "model on a hub (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), of which what is needed is downloaded.",
    )
    tokenizer: str | None = Field(
        None, description="Tokenizer directory, or name on a hub; the model's own when not given."
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a model that a hub is asked for; its main branch when not given."
    )
    download_dir: str | None = Field(
        None, description="Where models of a hub are kept; huggingface_hub's own cache (HF_HOME) when not given."
    )
    load_format: Annotated[str, OneOf(LOAD_FORMATS, ("auto",))] = Field(
        "auto",
        description="Where the weights come from. `safetensors`; `pt`: pytorch_model.bin, of which only tensors are "
        "read; `sharded_state`: each rank's own, as `manta save-sharded` wrote them; `gguf`: the file that `model` "
        "names; `dummy`: random numbers, no checkpoint is read. `auto`: the first of these that the directory holds, "
        "sharded_state before all.",
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="Whose modules: Manta's, or Hugging Face transformers'. `auto`: Manta's where it has them."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto",
        description="What the model is run for: to generate text, or for embeddings, scores and classes. `auto`: "
        "encoders, classifiers and what sentence-transformers packed are for pooling, language models generate.",
    )
    matryoshka: bool = Field(
        False, description="Let requests cut embeddings short (`dimensions`) although config.json does not offer it."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Compute type, and that of the KV cache unless kv_cache_dtype says otherwise. `auto`: float32 on a "
        "CPU, the checkpoint's type on a GPU.",
    )
    cpu_offload_gb: float = Field(0, ge=0, description="GiB of each GPU's weights to keep in host memory instead.")
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "int8_per_token_head"], BeforeValidator(_kv_cache_dtype)] = Field(
        "auto",
        description="`fp8`: keep keys and values in 8 bits (e4m3; also written fp8_e4m3), which halves the KV cache of "
        "a 16-bit model and the reading of it; arithmetic stays in 16 or 32 bits. With the checkpoint's k_scale and "
        "v_scale where it has them, else 1. On GPUs of compute capability 8.9 or later, and CPUs. "
        "`int8_per_token_head` (or int8): whole numbers, a scale for each token and head; on CPUs. `auto`: as dtype.",
    )
    quantization: Annotated[str, OneOf(QUANT_METHODS)] | None = Field(
        None,
        description="Quantize the linear layers while loading. `fp8`: weights per output channel, activations per "
        "token. `fp8_block`: in blocks of 128. `int8`: as fp8, in whole numbers. `w4`: weights alone, 4 bits in groups "
        "of 128. fp8 is for GPUs of compute capability 8.9 or later with dtype bfloat16, and CPUs. The other names are "
        "those of checkpoints that are quantized already, which need no option.",
    )
    device: Annotated[str, OneOf(PLATFORMS, ("auto",))] = Field("auto", description="`auto`: a visible GPU, else cpu.")
    seed: int = Field(0, description="Seed of dummy weights.")

    max_model_len: int | None = Field(
        None, ge=1, description="Longest prompt plus output, in tokens; the model's own context when not given."
    )
    block_size: int = Field(16, ge=1, description="Tokens per KV-cache block.")
    num_blocks: int | None = Field(
        None, ge=1, description="KV-cache blocks of all layers; worked out from the memory settings when not given."
    )
    kv_cache_memory_bytes: int = Field(1 << 30, ge=1, description="Most memory the KV cache takes on a CPU, in bytes.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the GPU's memory for weights, activations and KV cache together."
    )
    hybrid_kv_cache: Literal["auto", "off"] = Field(
        "auto", description="`auto`: layers with a sliding window keep its blocks only, where that saves memory."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of prompts that share a prefix.")
    kv_host_memory_bytes: int = Field(
        0,
        ge=0,
        description="Host memory of each worker (pinned, on a GPU) for KV blocks that the device cache gave up: "
        "a prompt that finds them copies them back instead of computing them. 0: none.",
    )
    kv_connector: Annotated[str, OneOf(KV_CONNECTORS)] = Field(
        "host_memory", description="What keeps such blocks; host_memory gives up the least recently used ones first."
    )

    max_num_seqs: int = Field(128, ge=1, description="Most requests in one step; also the rows on the device.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Most tokens in one step; longer prompts are chunked.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="`priority`: lower `priority` first, then first come first served."
    )
    max_inflight_steps: int = Field(
        2,
        ge=1,
        le=32,
        description="Steps scheduled before the first one's tokens are back; 1 is synchronous stepping. When not "
        "given, 2, or pipeline_parallel_size + 1 where that is more: fewer would leave stages idle.",
    )

    tensor_parallel_size: int = Field(1, ge=1, description="GPUs that share each layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Stages the layers are split into.")
    pipeline_partition: tuple[int, ...] | None = Field(
        None, description="Layers of each stage, first to last; split evenly when not given."
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Each GPU of tensor_parallel_size holds whole experts, instead of a share of each one's width.",
    )
    enable_eplb: bool = Field(
        False, description="With enable_expert_parallel: move and copy experts so that GPUs are equally busy."
    )
    num_redundant_experts: int = Field(
        0, ge=0, description="Copies of experts in a layer (enable_eplb), rounded up to as many slots on each GPU."
    )
    eplb_window_size: int = Field(1000, ge=1, description="Steps whose tokens decide where experts go (enable_eplb).")
    eplb_step_interval: int = Field(3000, ge=1, description="Steps from one such decision to the next (enable_eplb).")
    small_all_reduce: Literal["auto", "nccl", "symmetric_memory"] = Field(
        "auto",
        description="How GPUs of one host sum up small messages: torch's symmetric-memory kernels or NCCL. `auto`: by "
        "a measured table; NCCL where symmetric memory is not to be had. CPUs use gloo.",
    )
    executor: Annotated[str, OneOf(EXECUTORS)] = Field(
        "ray_workers",
        description="Where the workers run: in this process (one rank only), as child processes of it without Ray, or "
        "as actors of the placement group.",
    )
    step_transport: Annotated[str, OneOf(STEP_TRANSPORTS, ("auto",))] = Field(
        "auto",
        description="How steps reach ray_workers. `auto`: compiled_graph on GPUs of the replica's node, else socket.",
    )
    attention_backend: Annotated[str, OneOf(ATTENTION_BACKENDS, ("auto",))] = Field(
        "auto", description="`auto`: triton on GPUs, torch on CPUs."
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay decode steps from CUDA graphs. `auto`: on a GPU where attention_backend can be captured, "
        "going on without them should the capture fail (with tensor_parallel_size > 1 an error); `on`: an error where "
        "they cannot be had.",
    )
    cuda_graph_sizes: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        min_length=1,
        description="Numbers of requests to capture a step for; a step runs at the next larger one, beyond the largest "
        "without a graph. When not given: 1, 2, 4, 8, 16, 24, ... up to max_num_seqs.",
    )
    cascade_attention: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Decodes read a prefix that they share once for all (Triton attention only; results differ by "
        "rounding). `auto`: not in float32, and in steps where that saves enough reading; `on`: in every step with two "
        "decodes or more.",
    )
    logits_processors: tuple[Annotated[str, OneOf(EXTRA_LOGITS_PROCESSORS)], ...] = Field(
        (),
        description="Plugins that edit the logits of every step, in this order, before what requests ask for: what a "
        "grammar or allowed_token_ids rule out stays ruled out.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each worker (CPU only). When not given: all cores for in_process; else all but "
        "one, which the ingress and the engine need, shared out among the workers.",
    )
    grammar_max_bytes: int = Field(256 << 10, ge=1, description="Longest grammar or schema of structured outputs.")
    grammar_max_depth: int = Field(96, ge=1, description="Most levels of nesting in a schema of structured outputs.")
    grammar_timeout_s: float = Field(
        0.5, gt=0, description="Time that compiling a grammar may take, in a process of its own; then it is refused."
    )
    grammar_memory_bytes: int = Field(
        256 << 20, ge=16 << 20, description="Memory that compiling a grammar may take, in a process of its own."
    )
    grammar_cache_size: int = Field(128, ge=1, description="Compiled grammars kept for further requests.")

    start_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Workers in processes of their own that take longer to load the model and get ready hang: the "
        "replica ends and is replaced.",
    )
    step_timeout_s: float = Field(
        300.0,
        gt=0,
        description="A step that takes longer means a hung worker: the replica exits and is replaced. Once steps "
        "have been measured, one far longer than they (10 x their 99th percentile, at least 5 s) means that too.",
    )

    @field_validator("logits_processors")
    @classmethod
    def _once_each(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _without_twins(names)

    @property
    def world_size(self) -> int:
        """Workers of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="before")
    @classmethod
    def _fill_the_pipeline(cls, values: Any) -> Any:
        """Steps in flight follow from the number of stages unless they are given."""
        if isinstance(values, dict) and "max_inflight_steps" not in values:
            stages = values.get("pipeline_parallel_size", 1)
            if isinstance(stages, int) and stages > 1:
                values = {**values, "max_inflight_steps": stages + 1}
        return values

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.kv_host_memory_bytes and not self.enable_prefix_caching:
            raise ValueError("kv_host_memory_bytes keeps cached prefixes, but enable_prefix_caching is off")
        if self.executor in OWN_PROCESS and self.world_size > 1:
            raise ValueError(
                f"executor={self.executor} runs one worker, but tensor_parallel_size={self.tensor_parallel_size} x "
                f"pipeline_parallel_size={self.pipeline_parallel_size} need {self.world_size}: "
                "use local_processes or ray_workers"
            )
        if self.pipeline_partition is not None and len(self.pipeline_partition) != self.pipeline_parallel_size:
            raise ValueError(
                f"pipeline_partition names {len(self.pipeline_partition)} stages, "
                f"pipeline_parallel_size={self.pipeline_parallel_size}"
            )
        return self


class RequestLimits(Frozen):
    """What one HTTP request may ask for."""

    max_body_bytes: int = Field(32 << 20, ge=1, description="Largest HTTP body, but for a file's.")
    max_file_bytes: int = Field(128 << 20, ge=1, description="Largest file that may be uploaded.")
    max_body_s: float = Field(120.0, gt=0, description="Longest that an HTTP body may take to arrive, in seconds.")
    max_bodies_bytes: int = Field(
        1 << 30,
        ge=1,
        description="Memory for the bodies of all requests in flight in an ingress replica; half of it for one tenant.",
    )
    max_n: int = Field(128, ge=1, description="Most choices of one request (`n`).")
    max_choices: int = Field(1024, ge=1, description="Most choices of all prompts of one request together.")
    max_prompts: int = Field(1024, ge=1, description="Most prompts in one completions request.")
    max_prompt_chars: int = Field(
        8 << 20, ge=1, le=MAX_TEXT_CHARS, description="Most characters of all texts of one request together."
    )
    max_logprobs: int = Field(20, ge=0, description="Most logprobs a token.")
    max_stop: int = Field(16, ge=0, description="Most stop strings.")
    max_stop_chars: int = Field(1024, ge=1, description="Longest stop string, in characters.")
    max_logit_bias: int = Field(1024, ge=0, description="Most entries of `logit_bias`, and of `stop_token_ids`.")
    max_bad_words: int = Field(128, ge=0, description="Most bad words.")
    max_bad_words_chars: int = Field(8192, ge=0, description="Most characters of all bad words together.")
    max_tools: int = Field(128, ge=0, description="Most tools of one request.")
    max_tools_bytes: int = Field(1 << 20, ge=1, description="Largest definition of all tools together, as JSON.")
    max_messages: int = Field(4096, ge=1, description="Most messages or items of one conversation.")
    max_json_depth: int = Field(64, ge=1, description="Deepest nesting of a JSON body.")
    max_headers: int = Field(100, ge=1, description="Most HTTP headers.")
    max_header_bytes: int = Field(32 << 10, ge=1, description="Largest HTTP header block, names and values together.")
    max_template_s: float = Field(5.0, gt=0, description="Longest that a chat template may take over a conversation.")
    max_template_chars: int = Field(8 << 20, ge=1, description="Longest prompt that a chat template may write.")
    trust_request_chat_template: bool = Field(
        False, description="Let a request bring its own `chat_template`; it runs in a process of its own, with limits."
    )
    max_waiting_requests: int = Field(4096, ge=1, description="Requests in flight per ingress replica before a 429.")


class IngressConfig(Frozen):
    """The HTTP front: dialects, text, streams."""

    num_replicas: int = Field(1, ge=1, description="Ingress replicas; two survive the loss of one.")
    num_cpus: float = Field(0.0, ge=0, description="Ray CPUs reserved for each replica.")
    route_timeout_s: float = Field(0.05, gt=0, description="Time the Router has to answer before the ingress chooses.")
    credit_window_tokens: int = Field(
        512, ge=1, description="Tokens of one request that may wait for a slow client before the engine holds it."
    )
    lease_s: float = Field(8.0, gt=0, description="An engine aborts the requests of an ingress silent for so long.")
    move_after_s: float = Field(
        5.0, ge=0, description="What runs longer on a replica that is taken out of service goes on at another one."
    )
    graceful_shutdown_timeout_s: float = Field(
        600.0, ge=0, description="Time an ingress replica that is taken out of service has for its streams to end."
    )
    admin: bool = Field(False, description="Open the administrator's routes (/debug/..., /server_info).")
    profile_directory: str | None = Field(
        None,
        description="Folder on the engines' nodes that /start_profile and /memory_snapshot write into; they are routes "
        "of the administrator, and refused where this is not set.",
    )
    tokenizer_info: bool = Field(False, description="Open /tokenizer_info: tokenizer_config.json and chat template.")
    api_keys_file: str | None = Field(
        None,
        description="File of API keys, one a line: `key`, `sha256:<hex>`, each with an optional `tenant=` in front. "
        "The environment (MANTA_API_KEYS, MANTA_API_KEYS_FILE) may name further ones; without any the server is open.",
    )
    api_key_hashes: tuple[str, ...] = Field(
        (), description="API keys as `sha256:<hex>`, with an optional `tenant=` in front; never the keys themselves."
    )
    cors_origins: tuple[str, ...] = Field((), description="Origins whose pages may call the API; `*` means any.")
    sse_keep_alive_s: float = Field(15.0, gt=0, description="A stream that is silent for so long sends a comment.")
    max_stored_responses: int = Field(10_000, ge=0, description="Responses kept for /v1/responses/{id}; 0 keeps none.")
    work_threads: int = Field(
        0, ge=0, description="Threads that tokenise, render templates and parse; 0: as many as cores, from 2 to 8."
    )
    max_waiting_work: int = Field(
        4096, ge=1, description="Pieces of such work that may wait for a thread; beyond them there is a 429."
    )
    max_waiting_work_per_tenant: int = Field(
        2048, ge=1, description="How many of those may be one tenant's; tenants take turns."
    )
    max_stored_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Memory for kept responses, in bytes. When it is full, the tenant that holds most loses what it "
        "has not used for longest.",
    )
    idempotency_s: float = Field(
        600.0, gt=0, description="An answer is kept so long for requests that come again with its Idempotency-Key."
    )
    max_kept_answers: int = Field(10_000, ge=0, description="Answers kept for that; 0 refuses such keys.")
    max_kept_answer_bytes: int = Field(
        256 << 20, ge=0, description="Memory for them, in bytes; whose are forgotten first is as for kept responses."
    )
    max_tenant_running_keys: int = Field(256, ge=1, description="Requests with such a key under way of one tenant.")
    max_background_responses: int = Field(256, ge=0, description="Background responses under way per ingress replica.")
    max_tenant_background_responses: int = Field(64, ge=0, description="The same of one tenant.")
    max_file_store_bytes: int = Field(
        1 << 30, ge=0, description="Memory for the files of /v1/files and the results of batches, in bytes."
    )
    max_tenant_file_store_bytes: int = Field(256 << 20, ge=0, description="The same of one tenant.")
    max_files: int = Field(8192, ge=0, description="Files that are kept; 0 keeps none.")
    max_tenant_files: int = Field(1024, ge=0, description="The same of one tenant.")
    max_batch_concurrency: int = Field(
        32, ge=1, description="Requests of batches under way per ingress replica; tenants share them."
    )
    max_tenant_batches: int = Field(16, ge=0, description="Batches under way of one tenant.")
    max_batch_requests: int = Field(50_000, ge=1, description="Most requests in one batch.")
    limits: RequestLimits = RequestLimits()


class ModelConfig(Frozen):
    """One served model: its name on the wire, its engine, its replicas."""

    name: str = Field(min_length=1, description="Name in `model` of a request.")
    aliases: tuple[str, ...] = Field((), description="Further names for the same model.")
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
        description="How the model writes tool calls (app/api/parsers). `auto`: by the chat template; `none`: it "
        "cannot.",
    )
    reasoning_parser: Annotated[str, OneOf(REASONING_PARSERS, ("auto", "none"))] = Field(
        "auto",
        description="How the model writes its reasoning (app/api/parsers). `auto`: by the chat template; `none`: "
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
        return _without_twins(names)

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
        """Whether there may be no replica."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @model_validator(mode="after")
    def _check_replicas(self) -> ModelConfig:
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            raise ValueError(
                "num_replicas: autoscaling chooses it; for the start there is autoscaling.initial_replicas"
            )
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


class ServeConfig(Frozen):
    """`args:` of the Serve application `app.deployments.app:build`."""

    models: tuple[ModelConfig, ...] = Field(min_length=1, description="The models; the first is the default.")
    ingress: IngressConfig = IngressConfig()
    router: RouterConfig = RouterConfig()
    admission: AdmissionConfig = AdmissionConfig()
    admin: AdminConfig = AdminConfig()

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise ValueError(f"models: the name {sorted(double)[0]!r} is used twice")
        return self
