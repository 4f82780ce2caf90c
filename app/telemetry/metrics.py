"""Every metric of Manta, declared in one table under vLLM's names.

Each replica records its own (Ray's metric API drops names with a colon, so this does not go through it); any ingress
replica collects the snapshots of all and renders them (`exposition`). A series is told apart by its labels `model_name`
and `engine` (the replica's index); ingress series by `ingress`. The values of further labels are few: see LABEL_VALUES.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
ITERATION_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
N_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
KV_RESIDENCY_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)
STEP_S = (*(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5), *(1.0, 2.0, 5.0, 10.0))
HTTP_S = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))  # cut at max_model_len

MOST_DRAFTS = 32  # of a request in a step

Kind = Literal["counter", "gauge", "histogram"]
Scope = Literal["engine", "ingress", "router"]
Reads = str | Mapping[str, str]

# The values that a label may take; a text says what bounds those that are not known beforehand.
LABEL_VALUES: dict[str, tuple[str, ...] | str] = {
    "reason": ("capacity", "deferred", "lost", "moved"),
    "finished_reason": ("stop", "length", "tool_calls", "abort", "error"),
    "source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "sleep_state": ("awake", "weights_offloaded", "discard_all"),
    "phase": ("schedule", "wait", "update", "device"),
    "slo": ("ttft", "itl"),
    "met": ("yes", "no"),
    "kind": ("prompt", "output"),
    "held": ("bodies", "lines of batches"),
    "store": ("responses", "answers", "files", "batches"),
    "position": tuple(str(position) for position in range(MOST_DRAFTS)),
    "status": ("1xx", "2xx", "3xx", "4xx", "5xx"),
    "method": ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PATCH", "other"),
    "handler": "the paths of the server's routes, and `none`",
    "class": ("interactive", "default", "bulk"),
    "decision": (
        *("admitted", "waited", "local"),
        *("rejected_tenant", "rejected_server", "rejected_retry", "rejected_ingress"),
    ),
    "field": "the names in the tables of ignored fields and headers, and `other`",
    "level": "what routing policies can be informed by",
    "model_name": "the served models",
    "outcome": ("loaded", "absent", "failed"),
    "tenant": "digests of the tenants with most tokens, at most 32 for an engine, and `other`",
    **dict.fromkeys(("max_lora", "waiting_lora_adapters", "running_lora_adapters"), "one for an engine: the newest"),
    **dict.fromkeys(
        ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"), "one for an engine"
    ),
}

# Where a metric has only some of them.
OWN_LABEL_VALUES = {("manta:ingress_migrations_total", "reason"): ("lost", "moved")}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `labels` come after those that identify the replica; buckets are upper bounds.

    `reads` says where an engine's value comes from, as "source.name", or one such place for each value of its label:
    `stats` (EngineStats, what routing decides on), `figures` (`telemetry/figures.py`), `step` (StepStats or what it
    measured, for each step) and `request` (RequestTimings, for each one that ended). Empty: who counts it sets it.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    reads: Reads = ""

    @property
    def known_series(self) -> list[tuple[str, ...]]:
        """Further labels of the series that are there from the start: a counter's, where all their values are known."""
        known = [OWN_LABEL_VALUES.get((self.name, label), LABEL_VALUES[label]) for label in self.labels]
        if any(isinstance(values, str) for values in known) or (self.labels and self.kind != "counter"):
            return []
        return list(itertools.product(*known))

    @property
    def sources(self) -> list[tuple[tuple[str, ...], str, str]]:
        """Returns what `reads` says: label values, source, name."""
        reads = {(): self.reads} if isinstance(self.reads, str) else {(value,): it for value, it in self.reads.items()}
        return [(labels, *_source(where)) for labels, where in reads.items() if where]

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Tells which kinds of replica count it."""
        if self.name.startswith("process_"):
            return ("engine", "ingress", "router")
        if self.name.startswith(("manta:router_", "manta:queue_seconds_")):
            return ("router",)
        return ("ingress",) if self.name.startswith(("manta:ingress_", "manta:admission_", "http_")) else ("engine",)


def _source(where: str) -> tuple[str, str]:
    source, _, name = where.partition(".")
    return source, name


def _counter(name: str, help: str, *labels: str, reads: Reads = "") -> Metric:
    return Metric(name, "counter", help, labels, reads=reads)


def _gauge(name: str, help: str, *labels: str, reads: Reads = "") -> Metric:
    return Metric(name, "gauge", help, labels, reads=reads)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str, reads: Reads = "") -> Metric:
    return Metric(name, "histogram", help, labels, buckets, reads)


METRICS: tuple[Metric, ...] = (
    _gauge("vllm:num_requests_running", "Requests in the running batch.", reads="stats.num_running"),
    _gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.", reads="stats.num_waiting"),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "The same: for capacity, or deferred by a slow client.",
        "reason",
        reads={"capacity": "stats.num_undeferred", "deferred": "stats.num_deferred"},
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV-cache blocks in use, 0 to 1.", reads="stats.kv_cache_usage"),
    _counter(
        "vllm:num_preemptions_total", "Requests that had to give their KV blocks back.", reads="figures.preemptions"
    ),
    _counter(
        "manta:prompt_steps_replayed_total",
        "Steps with prompts whose layers came from a CUDA graph (cuda_graph_prompt_tokens).",
        reads="figures.prompt_steps_replayed",
    ),
    _counter(
        "manta:experts_moved_total",
        "Experts moved between GPUs to keep these equally busy (enable_eplb); of the last pipeline stage.",
        reads="figures.experts_moved",
    ),
    _gauge(
        "manta:expert_imbalance",
        "Busiest GPU's share of tokens over the mean, as counted last (enable_eplb); of the last pipeline stage.",
        reads="figures.expert_imbalance",
    ),
    _counter(
        "manta:adapter_slot_loads_total",
        "Adapters copied from host memory into a slot of the device.",
        reads="figures.adapter_slot_loads",
    ),
    _counter("manta:adapter_reads_total", "Adapters read from disk into host memory.", reads="figures.adapter_reads"),
    _counter("manta:adapter_read_seconds_total", "Time that those reads took.", reads="figures.adapter_read_seconds"),
    _counter("vllm:prompt_tokens_total", "Prompt tokens processed.", reads="figures.prompt_tokens"),
    _counter(
        "vllm:prompt_tokens_cached_total", "Prompt tokens found in the prefix cache.", reads="figures.cached_tokens"
    ),
    _counter(
        "vllm:prompt_tokens_by_source_total",
        "Prompt tokens: computed, found on the device, or brought back.",
        "source",
        reads={
            "local_compute": "figures.computed_tokens",
            "local_cache_hit": "figures.found_tokens",
            "external_kv_transfer": "figures.loaded_tokens",
        },
    ),
    _counter("vllm:generation_tokens_total", "Tokens generated.", reads="figures.generation_tokens"),
    _counter(
        "vllm:mm_cache_queries_total",
        "Pictures that steps with prompts showed the model.",
        reads="figures.mm_cache_queries",
    ),
    _counter(
        "vllm:mm_cache_hits_total",
        "Of those, what the encoder had made before and was kept.",
        reads="figures.mm_cache_hits",
    ),
    _counter(
        "vllm:spec_decode_num_drafts_total",
        "Times that drafts of a request were verified (speculative decoding).",
        reads="figures.drafts",
    ),
    _counter(
        "vllm:spec_decode_num_draft_tokens_total", "Draft tokens that were verified.", reads="figures.draft_tokens"
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_total", "Draft tokens that were right.", reads="figures.accepted_tokens"
    ),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "The same, by their place among a request's drafts.",
        "position",
        reads={str(position): f"figures.accepted_at_{position}" for position in range(MOST_DRAFTS)},
    ),
    _counter(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        reads="figures.prefix_cache_queries",
    ),
    _counter("vllm:prefix_cache_hits_total", "Prompt tokens the prefix cache held.", reads="figures.prefix_cache_hits"),
    _counter(
        "vllm:external_prefix_cache_queries_total",
        "Tokens looked up in the host-memory tier.",
        reads="figures.tier_queries",
    ),
    _counter(
        "vllm:external_prefix_cache_hits_total",
        "Tokens that the host-memory tier brought back.",
        reads="figures.tier_hits",
    ),
    _gauge(
        "manta:kv_host_usage_perc",
        "Share of the host-memory tier's KV blocks in use, 0 to 1.",
        reads="figures.kv_host_usage",
    ),
    _counter(
        "manta:kv_host_stored_bytes_total",
        "Bytes copied from the device to the host-memory tier.",
        reads="figures.kv_host_stored_bytes",
    ),
    _counter(
        "manta:kv_host_loaded_bytes_total",
        "Bytes copied back from the host-memory tier.",
        reads="figures.kv_host_loaded_bytes",
    ),
    _gauge(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "As manta:kv_host_usage_perc, under vLLM's name.",
        reads="figures.kv_host_usage",
    ),
    _counter(
        "vllm:kv_offload_store_bytes_total",
        "As manta:kv_host_stored_bytes_total, under vLLM's name.",
        reads="figures.kv_host_stored_bytes",
    ),
    _counter(
        "vllm:kv_offload_load_bytes_total",
        "As manta:kv_host_loaded_bytes_total, under vLLM's name.",
        reads="figures.kv_host_loaded_bytes",
    ),
    _histogram(
        "vllm:kv_block_lifetime_seconds",
        "From being handed out to its eviction; 1 block in 64.",
        KV_RESIDENCY_S,
        reads="step.lifetime_s",
    ),
    _histogram(
        "vllm:kv_block_idle_before_evict_seconds",
        "From a cached block's last use to its eviction.",
        KV_RESIDENCY_S,
        reads="step.idle_s",
    ),
    _histogram(
        "vllm:kv_block_reuse_gap_seconds",
        "Between two uses of a cached block.",
        KV_RESIDENCY_S,
        reads="step.reuse_gap_s",
    ),
    _gauge("vllm:engine_sleep_state", "1 for the state that the engine is in.", "sleep_state"),
    _counter("vllm:request_success_total", "Requests that ended, by reason.", "finished_reason"),
    _histogram("vllm:iteration_tokens_total", "Tokens of each engine step.", ITERATION_TOKENS, reads="step.num_tokens"),
    _histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_S, reads="step.ttft_s"),
    _histogram("vllm:inter_token_latency_seconds", "Between two outputs of a request.", ITL_S, reads="step.itl_s"),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "A request's mean time per token after the first.",
        ITL_S,
        reads="request.per_token_s",
    ),
    _histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_S, reads="request.e2e_s"),
    _histogram(
        "vllm:request_queue_time_seconds",
        "From arrival at the engine to being scheduled.",
        LATENCY_S,
        reads="request.queue_s",
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "From being scheduled to the first token.",
        LATENCY_S,
        reads="request.prefill_s",
    ),
    _histogram(
        "vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY_S, reads="request.decode_s"
    ),
    _histogram(
        "vllm:request_inference_time_seconds",
        "From being scheduled to the last token.",
        LATENCY_S,
        reads="request.inference_s",
    ),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS, reads="request.num_prompt_tokens"),
    _histogram(
        "vllm:request_generation_tokens", "Tokens a request generated.", TOKENS, reads="request.num_generation_tokens"
    ),
    _histogram(
        "vllm:request_max_num_generation_tokens",
        "Most tokens that a request might generate.",
        TOKENS,
        reads="request.max_tokens",
    ),
    _histogram("vllm:request_params_max_tokens", "The max_tokens of a request.", TOKENS, reads="request.max_tokens"),
    _histogram("vllm:request_params_n", "The n of a request.", N_CHOICES, reads="request.num_choices"),
    _histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that had to be computed.",
        TOKENS,
        reads="request.num_computed_prompt_tokens",
    ),
    _histogram(
        "vllm:request_num_preemptions", "Times a request was preempted.", PREEMPTIONS, reads="request.num_preemptions"
    ),
    _gauge(
        "vllm:lora_requests_info",
        "Names of the adapters (64 at most) that running and that waiting requests have, when that was so.",
        *("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    ),
    _gauge("manta:adapters_loaded", "Adapters that may be named by requests.", reads="stats.num_adapters"),
    _gauge(
        "vllm:cache_config_info",
        "Shape of the KV cache, its tokens, and how many requests of full length it holds; always 1.",
        *("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
    ),
    _histogram(
        "manta:step_seconds", "Time of an engine step, by phase.", STEP_S, "phase", reads={"device": "step.step_time_s"}
    ),
    _gauge("manta:slo_attainment", "Share of the last 1000 requests that met a service level objective.", "slo"),
    _counter(
        "manta:slo_requests_total", "Requests that met a service level objective, and that did not.", "slo", "met"
    ),
    _counter("manta:goodput_tokens_total", "Output tokens of requests that met all service level objectives."),
    _counter("manta:tenant_tokens_total", "Tokens of requests that ended, by tenant.", "tenant", "kind"),
    _gauge("manta:canary_age_seconds", "Since the engine last gave an output to a request or to a canary."),
    _gauge("manta:num_requests_paused", "Requests held back because their clients are slow.", reads="stats.num_paused"),
    _gauge(
        "manta:outstanding_tokens", "Tokens that the replica still has to process.", reads="stats.outstanding_tokens"
    ),
    _gauge("manta:ingress_requests", "Requests in flight in this ingress replica."),
    _gauge("manta:ingress_waiting_requests", "Requests that wait for a model's first replica.", "model_name"),
    _gauge("manta:ingress_channels", "Engine replicas that this ingress replica can send requests to."),
    _gauge("manta:ingress_direct_channels", "Engine replicas it has a connection of its own to."),
    _gauge(
        "manta:ingress_model_down",
        "1 while this ingress replica reaches no engine replica of a model that is to have one, else 0.",
        "model_name",
    ),
    _gauge("manta:ingress_store_down", "1 while the store of tenants does not answer this ingress replica, else 0."),
    _gauge("manta:ingress_sockets", "Websockets open in this ingress replica."),
    _gauge("manta:ingress_held_bytes", "Memory that this ingress replica holds for clients.", "held"),
    _gauge("manta:ingress_stored_entries", "Entries in the store of tenants, the same in each replica.", "store"),
    _gauge("manta:ingress_stored_bytes", "Their bytes.", "store"),
    _counter("manta:ingress_rejections_total", "Requests this ingress replica turned away because it was full."),
    _counter("manta:ingress_route_fallbacks_total", "Requests placed without an answer of the Router."),
    _counter("manta:ingress_routes_total", "Prompts placed, by what the choice was informed by.", "level"),
    _counter("manta:admission_total", "Prompts, by class of service and what became of them.", "class", "decision"),
    _gauge("manta:queue_seconds_estimated", "Time until what waits has begun.", "model_name", "class"),
    _counter("manta:ingress_migrations_total", "Requests that left a replica which had taken them.", "reason"),
    _histogram("manta:ingress_migration_stall_seconds", "From there to the next output, elsewhere.", LATENCY_S),
    _counter("manta:ingress_adapter_lookups_total", "Unknown model names looked up as adapters.", "outcome"),
    _counter("manta:ingress_channels_lost_total", "Token channels that broke while in use."),
    _counter("http_requests_total", "HTTP requests that were answered.", "handler", "method", "status"),
    _counter("manta:ingress_ignored_fields_total", "Fields and headers of requests that change nothing.", "field"),
    _histogram("http_request_duration_seconds", "Their time, to the answer's last byte.", HTTP_S, "handler", "method"),
    _gauge("process_start_time_seconds", "When the replica's process began, in seconds since 1970."),
    _gauge("manta:router_feeds", "Engine replicas that this Router replica listens to.", "model_name"),
    _gauge("manta:router_index_blocks", "KV blocks in the index.", "model_name"),
    _gauge("manta:router_speculative_blocks", "Blocks that dispatched requests are about to store.", "model_name"),
    _counter("manta:router_index_evicted_total", "Blocks the index gave up because of its cap.", "model_name"),
    _counter("manta:router_event_batches_total", "Batches of KV events taken in.", "model_name"),
    _counter("manta:router_event_gaps_total", "Feeds opened anew because a batch was missing.", "model_name"),
)
