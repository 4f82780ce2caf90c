"""Grafana's boards: `python -m tools.boards` writes cluster/grafana/boards/*.json from the table BOARDS.

A panel is a title, a unit and its series; MODEL and ENGINE stand for the filters of the board's variables. A test holds
that the files are current and that each expression asks for metrics that Manta exposes; `python -m tools.boards_check`
runs them all over a loaded server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = Path(__file__).resolve().parent.parent / "cluster/grafana/boards"
MODEL = 'model_name=~"$model"'
ENGINE = f'{MODEL}, engine=~"$engine"'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8  # of Grafana's 24 columns
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. `series` are pairs of an expression and a legend; `kind` is Grafana's name of the picture."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    help: str = ""
    kind: str = "timeseries"


def quantiles(title: str, metric: str, by: str = "model_name", unit: str = "s", where: str = ENGINE) -> Panel:
    """The median, the 90th and the 99th percentile of a histogram."""
    series = tuple(
        (
            f"histogram_quantile({share}, sum by ({by}, le) (rate({metric}_bucket{{{where}}}[$__rate_interval])))",
            f"{{{{{by}}}}} p{name}",
        )
        for share, name in (("0.5", "50"), ("0.9", "90"), ("0.99", "99"))
    )
    return Panel(title, unit, series)


def rate(title: str, metric: str, by: str, unit: str = "reqps", where: str = ENGINE, help: str = "") -> Panel:
    """A counter a second, by one label."""
    expr = f"sum by ({by}) (rate({metric}{_braces(where)}[$__rate_interval]))"
    return Panel(title, unit, ((expr, f"{{{{{by}}}}}"),), help)


def gauge(title: str, metric: str, by: str, unit: str = "short", where: str = ENGINE, help: str = "") -> Panel:
    """A gauge, summed up by one label."""
    return Panel(title, unit, ((f"sum by ({by}) ({metric}{_braces(where)})", f"{{{{{by}}}}}"),), help)


def share(title: str, part: str, whole: str, by: str, where: str = ENGINE, help: str = "") -> Panel:
    """The share of one counter in another, by one label."""
    first, second = (f"sum by ({by}) (rate({each}{_braces(where)}[$__rate_interval]))" for each in (part, whole))
    return Panel(title, "percentunit", ((f"{first} / {second}", f"{{{{{by}}}}}"),), help)


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""


def mean(title: str, metric: str, by: str = "engine", unit: str = "s") -> Panel:
    """The mean of a histogram, by one label."""
    return Panel(title, unit, share(title, f"{metric}_sum", f"{metric}_count", by).series)


FAILED = (
    f'sum by (model_name) (rate(vllm:request_success_total{{finished_reason="error", {ENGINE}}}[$__rate_interval]))'
)
BOARDS: dict[str, tuple[Panel, ...]] = {
    "fleet": (
        rate("Requests that ended", "vllm:request_success_total", "model_name"),
        rate("Output tokens", "vllm:generation_tokens_total", "model_name", "tps"),
        rate("Prompt tokens", "vllm:prompt_tokens_total", "model_name", "tps"),
        quantiles("Time to first token", "vllm:time_to_first_token_seconds"),
        quantiles("Time per output token", "vllm:request_time_per_output_token_seconds"),
        quantiles("Time of a request", "vllm:e2e_request_latency_seconds"),
        rate("How requests ended", "vllm:request_success_total", "finished_reason"),
        Panel("Requests that failed", "reqps", ((FAILED, "{{model_name}}"),)),
        rate("429: the ingress is full", "manta:ingress_rejections_total", "ingress", where=""),
        gauge("Requests that run", "vllm:num_requests_running", "model_name"),
        gauge("Requests that wait", "vllm:num_requests_waiting", "model_name"),
        gauge("Requests in each ingress", "manta:ingress_requests", "ingress", where=""),
        gauge("Websockets open in each ingress", "manta:ingress_sockets", "ingress", where=""),
        gauge("Memory held for clients", "manta:ingress_held_bytes", "held", where="", unit="bytes"),
        Panel("Entries kept for tenants", "short", (("max by (store) (manta:ingress_stored_entries)", "{{store}}"),)),
        Panel("Memory of what is kept for tenants", "bytes",
              (("max by (store) (manta:ingress_stored_bytes)", "{{store}}"),)),
        Panel("Service level objectives attained", "percentunit",
              ((f"avg by (model_name, slo) (manta:slo_attainment{{{ENGINE}}})", "{{model_name}} {{slo}}"),)),
        Panel("Requests by objective met", "reqps",
              ((f"sum by (slo, met) (rate(manta:slo_requests_total{{{ENGINE}}}[$__rate_interval]))",
                "{{slo}}: {{met}}"),)),
        rate("Goodput", "manta:goodput_tokens_total", "model_name", "tps"),
        rate("Tokens of tenants", "manta:tenant_tokens_total", "tenant", "tps"),
        rate("HTTP answers", "http_requests_total", "status", where=""),
        rate("Fields that change nothing", "manta:ingress_ignored_fields_total", "field", where="",
             help="Known ones by name, unknown ones as `other`: what clients send and the server ignores"),
        rate("Unknown models looked up as adapters", "manta:ingress_adapter_lookups_total", "outcome", where=""),
        quantiles("Time of HTTP requests", "http_request_duration_seconds", "handler", where=""),
        Panel("Uptime", "s", (("time() - min by (ingress) (process_start_time_seconds)", "{{ingress}}"),)),
    ),
    "routing": (
        rate("Choices, by what informed them", "manta:ingress_routes_total", "level", where=""),
        rate("Choices without the Router", "manta:ingress_route_fallbacks_total", "ingress", where=""),
        share(
            "Tokens found in the cache", "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "engine"
        ),
        gauge("Tokens that each replica has before it", "manta:outstanding_tokens", "engine"),
        rate("Requests of each replica", "vllm:request_success_total", "engine"),
        gauge("Replicas that the Router hears", "manta:router_feeds", "model_name", where=MODEL),
        gauge("Blocks in the index", "manta:router_index_blocks", "model_name", where=MODEL),
        gauge("Blocks that are about to be stored", "manta:router_speculative_blocks", "model_name", where=MODEL),
        rate("Blocks that the index gave up", "manta:router_index_evicted_total", "model_name", "ops", MODEL),
        rate("Requests asked to be admitted, and the answers", "manta:admission_total", "decision", where=""),
        gauge("Time until a new request's turn", "manta:queue_seconds_estimated", "class", "s", MODEL),
        rate("Batches of KV events", "manta:router_event_batches_total", "model_name", "ops", MODEL),
        rate("Batches that were missing", "manta:router_event_gaps_total", "model_name", "ops", MODEL),
    ),
    "capacity": (
        gauge("KV blocks in use", "vllm:kv_cache_usage_perc", "engine", "percentunit"),
        gauge("Requests that run", "vllm:num_requests_running", "engine"),
        gauge("Requests that wait, and why", "vllm:num_requests_waiting_by_reason", "reason"),
        quantiles("Time in the queue", "vllm:request_queue_time_seconds", "engine"),
        rate("Requests that gave their blocks back", "vllm:num_preemptions_total", "engine", "ops"),
        gauge("Requests held for slow clients", "manta:num_requests_paused", "engine"),
        share("Draft tokens that were right", "vllm:spec_decode_num_accepted_tokens_total",
              "vllm:spec_decode_num_draft_tokens_total", "engine"),
        rate("Drafts that were right, by their place", "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position",
             "ops"),
        rate("Requests' drafts verified", "vllm:spec_decode_num_drafts_total", "engine", "ops"),
        rate("Steps with prompts from CUDA graphs", "manta:prompt_steps_replayed_total", "engine", "ops"),
        gauge("Adapters that may be named", "manta:adapters_loaded", "engine"),
        rate("Adapters put into slots", "manta:adapter_slot_loads_total", "engine", "ops"),
        rate("Adapters read from disk", "manta:adapter_reads_total", "engine", "ops"),
        Panel(
            "Time to read an adapter",
            "s",
            ((f"sum by (engine) (rate(manta:adapter_read_seconds_total{{{ENGINE}}}[$__rate_interval])) / "
              f"sum by (engine) (rate(manta:adapter_reads_total{{{ENGINE}}}[$__rate_interval]))", "{{engine}}"),),
        ),
        gauge("Requests that wait for a first replica", "manta:ingress_waiting_requests", "model_name", where=MODEL),
        Panel(
            "Requests of full length that fit",
            "short",
            ((f"max by (engine, kv_cache_max_concurrency) (vllm:cache_config_info{{{ENGINE}}})",
              "{{engine}}: {{kv_cache_max_concurrency}}"),),
            kind="stat",
        ),
        gauge("Blocks in host memory", "manta:kv_host_usage_perc", "engine", "percentunit"),
        share("Tokens found in host memory", "vllm:external_prefix_cache_hits_total",
              "vllm:external_prefix_cache_queries_total", "engine"),
        rate("Bytes to host memory", "manta:kv_host_stored_bytes_total", "engine", "Bps"),
        rate("Bytes from host memory", "manta:kv_host_loaded_bytes_total", "engine", "Bps"),
        share("Pictures found encoded", "vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total", "engine"),
        gauge("Load of experts, largest to mean", "manta:expert_imbalance", "engine"),
        rate("Experts moved", "manta:experts_moved_total", "engine", "ops"),
        quantiles("Prompt tokens of a request", "vllm:request_prompt_tokens", unit="short"),
        quantiles("Life of a KV block", "vllm:kv_block_lifetime_seconds", "engine"),
        quantiles("Idle time before eviction", "vllm:kv_block_idle_before_evict_seconds", "engine"),
        quantiles("Between two uses of a cached block", "vllm:kv_block_reuse_gap_seconds", "engine"),
    ),
    "failover": (
        gauge("Replicas that each ingress reaches", "manta:ingress_channels", "ingress", where=""),
        gauge("Those that it has a connection to", "manta:ingress_direct_channels", "ingress", where="",
              help="the others are reached over Serve's handles, slower: an ingress' log says why"),
        gauge("Ingresses that the store does not answer", "manta:ingress_store_down", "ingress", where=""),
        gauge("Models without a replica, though not asleep", "manta:ingress_model_down", "model_name", where=""),
        rate("Replicas lost", "manta:ingress_channels_lost_total", "ingress", "ops", ""),
        rate("Requests that went on elsewhere", "manta:ingress_migrations_total", "reason", where="",
             help="lost: their replica died; moved: it was taken out of service, or needed for a suspect alone"),
        quantiles("Pause of such a request", "manta:ingress_migration_stall_seconds", "ingress", where=""),
        Panel("Requests that failed", "reqps", ((FAILED, "{{model_name}}"),)),
        rate("429: the ingress is full", "manta:ingress_rejections_total", "ingress", where=""),
        rate("Choices without the Router", "manta:ingress_route_fallbacks_total", "ingress", where=""),
        rate("KV events that were missing", "manta:router_event_gaps_total", "model_name", "ops", MODEL),
        gauge("Replicas that the Router hears", "manta:router_feeds", "model_name", where=MODEL),
        gauge("Silence of each replica", "manta:canary_age_seconds", "engine", "s"),
        gauge("Engines by state of sleep", "vllm:engine_sleep_state", "sleep_state"),
    ),
    "engine": (
        rate("Steps", "vllm:iteration_tokens_total_count", "engine", "ops"),
        quantiles("Tokens of a step", "vllm:iteration_tokens_total", "engine", "short"),
        quantiles("Between two outputs of a request", "vllm:inter_token_latency_seconds", "engine"),
        mean("Time in the queue", "vllm:request_queue_time_seconds"),
        mean("Time of prefill", "vllm:request_prefill_time_seconds"),
        mean("Time of decode", "vllm:request_decode_time_seconds"),
        mean("Time in the batch", "vllm:request_inference_time_seconds"),
        rate("Prompt tokens", "vllm:prompt_tokens_total", "engine", "tps"),
        rate("Prompt tokens from the cache", "vllm:prompt_tokens_cached_total", "engine", "tps"),
        rate("Output tokens", "vllm:generation_tokens_total", "engine", "tps"),
        mean("Output tokens of a request", "vllm:request_generation_tokens", unit="short"),
        mean("Most tokens a request asked for", "vllm:request_params_max_tokens", unit="short"),
        mean("Choices of a request", "vllm:request_params_n", unit="short"),
        mean("Preemptions of a request", "vllm:request_num_preemptions", unit="short"),
        mean("Prompt tokens computed for a request", "vllm:request_prefill_kv_computed_tokens", unit="short"),
        rate("Prompt tokens by source", "vllm:prompt_tokens_by_source_total", "source", "tps"),
        mean("Time of a step by phase", "manta:step_seconds", "phase"),
    ),
}  # fmt: skip


def board(name: str) -> dict[str, Any]:
    """A board as Grafana reads it."""
    return {
        "uid": f"manta-{name}",
        "title": f"Manta: {name}",
        "tags": ["manta"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["manta"], "title": "Manta", "asDropdown": True, "keepTime": True}],
        "templating": {"list": _variables()},
        "panels": [_panel(number, panel) for number, panel in enumerate(BOARDS[name])],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return [source, _choice("model", "vllm:num_requests_running", "model_name"),
            _choice("engine", f"vllm:num_requests_running{{{MODEL}}}", "engine")]  # fmt: skip


def _choice(name: str, metric: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {label})", "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
        if panel.kind == "timeseries"
        else {"textMode": "name"},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
            for index, (expr, legend) in enumerate(panel.series)
        ],
    }


def made() -> dict[Path, str]:
    """Every file that this module writes, with its text."""
    return {PLACE / f"{name}.json": json.dumps(board(name), indent=1) + "\n" for name in BOARDS}


def main() -> None:
    """Write the files, and say which changed."""
    for path, text in made().items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.name)


if __name__ == "__main__":
    main()
