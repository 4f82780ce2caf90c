"""The flags of `vllm serve` that are none of ours: what each becomes, or why it is accepted, or what to do instead.

Names are those of vLLM 0.26 and later; flags that mean the same under the same name need no line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from app.checkpoints.adapters.adapter_files import adapter_directory
from app.config.ingress import KEYS_VARIABLE

# Short forms, and names that mean the same: the value stays as it is.
RENAMED: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--num-replicas",
    "-ep": "--enable-expert-parallel",
    "-q": "--quantization",
    "--data-parallel-size": "--num-replicas",
    "--api-server-count": "--ingress-num-replicas",
    "-asc": "--ingress-num-replicas",
    "-sc": "--speculative-config",
    "--num-gpu-blocks-override": "--num-blocks",
    "--max-logprobs": "--ingress-limits-max-logprobs",
    "--max-num-queued-reqs": "--ingress-limits-max-waiting-requests",
    "--trust-request-chat-template": "--ingress-limits-trust-request-chat-template",
    "--enable-tokenizer-info-endpoint": "--ingress-tokenizer-info",
    "--disable-uvicorn-access-log": "--no-ingress-access-log",
    "--sse-keep-alive-interval": "--ingress-sse-keep-alive-s",
    "--shutdown-timeout": "--graceful-shutdown-timeout-s",
}

# Flags without a value that stand for an option with one.
SWITCHES: Mapping[str, tuple[str, str]] = {
    "--enforce-eager": ("--cuda-graphs", "off"),
    "--no-async-scheduling": ("--max-inflight-steps", "1"),
    "--disable-hybrid-kv-cache-manager": ("--hybrid-kv-cache", "off"),
    "--disable-cascade-attn": ("--cascade-attention", "off"),
    "--disable-custom-all-reduce": ("--small-all-reduce", "nccl"),
}


@dataclass(frozen=True, slots=True)
class Translated:
    """A flag whose values are written otherwise: `words` makes our arguments of them."""

    words: Callable[[list[str]], list[str]]
    many: bool = False  # takes all words up to the next flag


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag that changes nothing here; `why` is printed. `values` are those that ask for what happens anyhow."""

    why: str
    takes_value: bool = False
    values: tuple[str, ...] = ()


def _each(flag: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _one_of(flag: str, names: Mapping[str, str]) -> Translated:
    """A flag some of whose values have another name here; ours says what it takes."""
    return Translated(lambda values: [flag, names.get(values[0], values[0])])


def _gibibytes(values: list[str]) -> list[str]:
    try:
        return ["--kv-host-memory-bytes", str(int(float(values[0]) * (1 << 30)))]
    except (ValueError, OverflowError):
        return ["--kv-host-memory-bytes", values[0]]  # whose own error names it


def _served_names(values: list[str]) -> list[str]:
    return ["--name", values[0], *_each("--aliases", values[1:])]


def _adapters(values: list[str]) -> list[str]:
    """`name=path`, or an object with both."""
    found: dict[str, str] = {}
    for value in values:
        name, _, path = value.partition("=")
        if value.startswith("{"):
            try:
                given = json.loads(value)
                name, path = str(given["name"]), str(given["path"])
            except (ValueError, LookupError, TypeError):
                path = ""
        if not name or not path:
            return ["--adapters", value]  # whose own error names it
        found[name] = os.path.abspath(adapter_directory(path))
    return ["--adapters", json.dumps(found, separators=(",", ":"))]


TRANSLATED: Mapping[str, Translated] = {
    "--lora-modules": Translated(_adapters, many=True),
    "--served-model-name": Translated(_served_names, many=True),
    "--allowed-media-domains": Translated(
        lambda values: _each("--ingress-media-allowed-media-domains", values), many=True
    ),
    "--cudagraph-capture-sizes": Translated(lambda values: _each("--cuda-graph-sizes", values), many=True),
    "--kv-offloading-size": Translated(_gibibytes),
    "--distributed-executor-backend": _one_of(
        "--executor", {"mp": "local_processes", "ray": "ray_workers", "uni": "in_process"}
    ),
    "--tool-call-parser": _one_of(
        "--tool-parser",
        {"openai": "harmony", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder"},
    ),
    "--reasoning-parser": _one_of(
        "--reasoning-parser", {"qwen3": "think", "glm45": "think", "openai_gptoss": "harmony", "deepseek_v3": "think"}
    ),
    "--dtype": _one_of("--dtype", {"half": "float16", "float": "float32"}),
}

# Numbers that vLLM also takes as 1k, 1K or 2.5m; "auto" and -1 leave the choice to the model.
SIZES = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")

_ALWAYS = "always on"
_NO_CODE = "a checkpoint's code is never run; the architectures of docs/models.md need none"
_LOG = "each request is a line of the access log; --no-ingress-access-log leaves them out"
_MEASURED = "always told"

ACCEPTED: Mapping[str, Accepted] = {
    "--enable-auto-tool-choice": Accepted(_ALWAYS),
    "--enable-chunked-prefill": Accepted(_ALWAYS),
    "--async-scheduling": Accepted(_ALWAYS),
    "--enable-request-id-headers": Accepted(_ALWAYS),
    "--enable-prompt-tokens-details": Accepted(_MEASURED),
    "--enable-server-load-tracking": Accepted("/load always tells"),
    "--enable-sleep-mode": Accepted("the admin routes always can (docs/admin.md)"),
    "--trust-remote-code": Accepted(_NO_CODE),
    "--enable-log-requests": Accepted(_LOG),
    "--no-enable-log-requests": Accepted(_LOG),
    "--disable-log-requests": Accepted(_LOG),
    "--disable-log-stats": Accepted("figures are read from /metrics; nothing logs them"),
    "--aggregate-engine-logging": Accepted("figures are read from /metrics; nothing logs them"),
    "--use-tqdm-on-load": Accepted("a start logs its stages"),
    "--log-error-stack": Accepted("unexpected errors are always logged with their stack"),
    "--enable-flashinfer-autotune": Accepted("kernels are Manta's own"),
    "--enable-cumem-allocator": Accepted("sleep needs no allocator of its own"),
    "--enable-bf16x3-router-gemm": Accepted("gates have kernels of their own"),
    "--skip-mm-profiling": Accepted("no model of media is there to profile"),
    "--disable-chunked-mm-input": Accepted("a picture is encoded whole, whatever chunk of a prompt it begins in"),
    "--fail-on-environ-validation": Accepted("a variable of Manta that is wrong always ends the start"),
    "--disable-frontend-multiprocessing": Accepted("the ingress and the engine are always processes of their own"),
    "--swap-space": Accepted("what is preempted is computed anew; --kv-host-memory-bytes keeps blocks", True),
    "--max-parallel-loading-workers": Accepted("each rank reads its own share", True),
    "--prefix-caching-hash-algo": Accepted("blocks have a keyed hash of 128 bits", True),
    "--generation-config": Accepted("the checkpoint's own is read", True, ("auto",)),
    "--tokenizer-mode": Accepted("tokenizers are the fast ones", True, ("auto", "hf")),
    "--config-format": Accepted("config.json, or the GGUF file, is read", True, ("auto", "hf")),
    "--all2all-backend": Accepted("experts' sums go by all-reduce", True, ("auto", "naive")),
    "--moe-backend": Accepted("experts have Triton and Gluon kernels of Manta's own", True, ("auto", "triton")),
    "--linear-backend": Accepted("a layer's kernel is chosen by its weights and the step's rows", True, ("auto",)),
    "--data-parallel-backend": Accepted("replicas are Ray's", True, ("ray",)),
    "--chat-template-content-format": Accepted("what the template reads decides", True, ("auto",)),
    "--response-role": Accepted("answers are the assistant's", True, ("assistant",)),
    "--renderer-num-workers": Accepted("--ingress-work-threads says how many", True),
    "--distributed-timeout-seconds": Accepted("--start-timeout-s and --step-timeout-s bound the ranks", True),
    "--cpu-distributed-timeout-seconds": Accepted("--start-timeout-s and --step-timeout-s bound the ranks", True),
    "--compilation-config": Accepted("nothing is compiled by torch; --cuda-graphs, --cuda-graph-sizes", True, ("{}",)),
    "-cc": Accepted("nothing is compiled by torch; --cuda-graphs, --cuda-graph-sizes", True, ("{}",)),
    "--optimization-level": Accepted("nothing is compiled by torch", True),
    "-O": Accepted("nothing is compiled by torch", True),
    "--performance-mode": Accepted("kernels are chosen by the step's size", True, ("balanced",)),
    "--safetensors-load-strategy": Accepted("how files are read is no option", True),
    "--disable-access-log-for-endpoints": Accepted("health and metrics are not in the access log", True),
    "--kv-offloading-backend": Accepted("--kv-connector names it", True, ("native",)),
    "--lora-dtype": Accepted("adapters have the model's type", True, ("auto",)),
    "--fully-sharded-loras": Accepted("ranks hold of an adapter what they hold of the layer"),
    "--specialize-active-lora": Accepted("steps of any adapters are replayed from the same graphs"),
    "--jit-monitor-mode": Accepted("kernels are compiled at the start", True),
    "--uvicorn-log-level": Accepted("the server's own lines are warnings and errors", True, ("warning", "error")),
}

_NODES = "nodes are Ray's: start Ray on each, then `manta serve` once (docs/deploying.md)"
_REPLICAS = "--num-replicas N gives replicas behind one router; nothing else of data parallelism is wanted"
_LORA = "adapters are for the linear layers of language models, and each says itself for which (docs/adapters.md)"
_DRAFTS = "give it as a key of --speculative-config (docs/speculation.md)"
_MEDIA = "these options of pictures, videos and sounds are not there (docs/not_there_yet.md)"
_STATES = "models with recurrent states are not there yet (docs/not_there_yet.md)"
_TLS = "TLS ends at a balancer before the server (docs/security.md)"
_OFFLOAD = "--cpu-offload-gb keeps layers' weights in host memory"
_TRANSFER = "caches are not sent between replicas; --kv-host-memory-bytes keeps blocks in host memory"
_CONTEXT = "context parallelism is not there yet (docs/not_there_yet.md)"
_PLUGIN = "name a plugin's entry point instead (docs/plugins.md)"
_IN_REQUEST = "a request asks for it itself (docs/api.md)"
_KERNELS = "kernels are chosen by what a layer needs; --attention-backend takes torch or triton"
_CHECKPOINT = "what the checkpoint says is followed; change its config.json"
_CPU_BINDING = "Ray and the operating system place the processes"
_FIGURES = "figures are in /metrics (docs/monitoring.md); --ingress-profile-directory records profiles"
_BATCHES = "--max-num-batched-tokens and --max-num-seqs shape the steps"
_MIDDLEWARE = "an endpoint or a stat logger of your own is a plugin (docs/plugins.md)"
_EPLB = "--enable-eplb with --num-redundant-experts, --eplb-window-size, --eplb-step-interval"
_TOKENIZER = "give --tokenizer a directory of it, and --revision for both"

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("--headless", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--device-ids"), _NODES
    ),
    **dict.fromkeys(
        (
            *("--data-parallel-address", "-dpa", "--data-parallel-rank", "-dpn", "--data-parallel-start-rank", "-dpr"),
            *("--data-parallel-rpc-port", "-dpp", "--data-parallel-size-local", "-dpl", "-dpb", "-dpe", "-dph", "-dpm"),
            *("--data-parallel-hybrid-lb", "--data-parallel-external-lb", "--data-parallel-multi-port-external-lb"),
            *("--data-parallel-supervisor-port", "--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s"),
            *("--dp-supervisor-probe-failure-threshold", "--disable-nccl-for-dp-synchronization"),
            *("--enable-elastic-ep", "--prefill-schedule-interval"),
        ),
        _REPLICAS,
    ),
    **dict.fromkeys(
        (
            *("--lora-target-modules", "--default-mm-loras"),
            *("--enable-mixed-moe-lora-format", "--enable-moe-shared-loras", "--enable-tower-connector-lora"),
        ),
        _LORA,
    ),
    **dict.fromkeys(("--spec-method", "--spec-model", "--spec-tokens"), _DRAFTS),
    "--use-fp64-gumbel": "random numbers are drawn in one precision; drafts change none of them (docs/speculation.md)",
    **dict.fromkeys(
        (
            *("--media-io-kwargs", "--allowed-local-media-path"),
            *("--interleave-mm-strings", "--enable-mm-embeds"),
            *("--mm-processor-cache-gb", "--mm-processor-cache-type", "--mm-shm-cache-max-object-size-mb"),
            *("--mm-encoder-attn-backend", "--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"),
            *("--mm-encoder-fp8-scale-save-margin", "--mm-encoder-fp8-scale-save-path", "--mm-encoder-only"),
            *("--mm-encoder-tp-mode", "--mm-ipc-gpu-memory-gb", "--mm-tensor-ipc", "--video-pruning-rate"),
            "--ec-transfer-config",
        ),
        _MEDIA,
    ),
    **dict.fromkeys(
        (
            *("--mamba-backend", "--mamba-block-size", "--mamba-cache-dtype", "--mamba-cache-mode"),
            *("--mamba-ssm-cache-dtype", "--mamba-cache-philox-rounds", "--enable-mamba-cache-stochastic-rounding"),
            "--gdn-prefill-backend",
        ),
        _STATES,
    ),
    **dict.fromkeys(
        (
            *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--enable-ssl-refresh"),
            *("--ssl-cert-reqs", "--ssl-ciphers"),
        ),
        _TLS,
    ),
    **dict.fromkeys(
        (
            *("--offload-backend", "--offload-group-size", "--offload-num-in-group", "--offload-params"),
            *("--offload-prefetch-step", "--cpu-offload-params"),
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(("--kv-transfer-config", "--kv-events-config"), _TRANSFER),
    **dict.fromkeys(
        (
            *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp"),
            *("--dcp-comm-backend", "--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size"),
        ),
        _CONTEXT,
    ),
    **dict.fromkeys(
        (
            *("--tool-parser-plugin", "--reasoning-parser-plugin", "--io-processor-plugin", "--scheduler-cls"),
            *("--worker-cls", "--worker-extension-cls", "--model-class-overrides"),
        ),
        _PLUGIN,
    ),
    **dict.fromkeys(
        (
            *("--return-tokens-as-token-ids", "--default-chat-template-kwargs", "--stream-interval"),
            *("--enable-force-include-usage", "--exclude-tools-when-tool-choice-none", "--enable-per-request-metrics"),
            *("--logprobs-mode", "--reasoning-config", "--enable-return-routed-experts", "--watermark"),
        ),
        _IN_REQUEST,
    ),
    **dict.fromkeys(
        (
            *("--attention-config", "-ac", "--kernel-config", "--ir-op-priority", "--override-attention-dtype"),
            *("--disable-sliding-window", "--kv-sharing-fast-prefill", "--calculate-kv-scales"),
            *("--kv-cache-dtype-skip-layers", "--enable-flash-late-interaction", "--diffusion-config", "-dc"),
        ),
        _KERNELS,
    ),
    **dict.fromkeys(
        (
            *("--hf-config-path", "--quantization-config", "--allow-deprecated-quantization"),
            *("--override-generation-config", "--pooler-config", "--convert", "--code-revision"),
        ),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("--numa-bind", "--numa-bind-cpus", "--numa-bind-nodes"), _CPU_BINDING),
    **dict.fromkeys(
        (
            *("--profiler-config", "--collect-detailed-traces", "--cudagraph-metrics", "--kv-cache-metrics"),
            *("--kv-cache-metrics-sample", "--enable-mfu-metrics", "--enable-layerwise-nvtx-tracing"),
            *("--enable-logging-iteration-details", "--show-hidden-metrics-for-version", "--ray-workers-use-nsight"),
            *("--jit-monitor-verbose",),
        ),
        _FIGURES,
    ),
    **dict.fromkeys(
        (
            *("--max-num-partial-prefills", "--max-long-partial-prefills", "--long-prefill-token-threshold"),
            *("--max-num-scheduled-tokens", "--scheduler-reserve-full-isl", "--ubatch-size", "--enable-dbo"),
            *("--dbo-decode-token-threshold", "--dbo-prefill-token-threshold", "--max-cudagraph-capture-size"),
            "--prefix-match-unit",
        ),
        _BATCHES,
    ),
    **dict.fromkeys(
        (
            *("--middleware", "--tool-server", "--additional-config", "--grpc", "--tokens-only"),
            *("--fingerprint-mode", "--fingerprint-value"),
        ),
        _MIDDLEWARE,
    ),
    **dict.fromkeys(("--eplb-config", "--expert-placement-strategy", "--enable-ep-weight-filter"), _EPLB),
    **dict.fromkeys(("--tokenizer-revision", "--skip-tokenizer-init"), _TOKENIZER),
    "--enable-prompt-embeds": "prompts are texts or token ids; embeddings as a prompt are not there yet",
    "--api-key": f"put keys into {KEYS_VARIABLE} or a file (--ingress-api-keys-file): all users see command lines",
    "--hf-token": "set HF_TOKEN in the environment: all users of the machine see command lines",
    "--otlp-traces-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment (docs/monitoring.md)",
    "--allowed-origins": "name each origin with --ingress-cors-origins",
    "--allowed-methods": "all methods of the API are allowed to the origins of --ingress-cors-origins",
    "--allowed-headers": "all headers of the API are allowed to the origins of --ingress-cors-origins",
    "--allow-credentials": "pages send keys in a header; cookies are not used",
    "--config": "give the YAML as `manta serve FILE.yaml`; `manta convert` reads those of other servers",
    "--uds": "Serve listens on --host and --port",
    "--root-path": "set route_prefix in a YAML",
    "--disable-fastapi-docs": "a balancer can close /docs; it shows nothing that docs/api.md does not",
    "--enable-offline-docs": "the page at /docs needs no network",
    "--log-config-file": "MANTA_LOG_FORMAT=json and MANTA_LOG_LEVEL shape the log (docs/monitoring.md)",
    "--max-log-len": "prompts are not logged",
    "--enable-log-outputs": "answers are not logged",
    "--enable-log-deltas": "answers are not logged",
    "--h11-max-incomplete-event-size": "--ingress-limits-max-header-bytes bounds headers",
    "--h11-max-header-count": "--ingress-limits-max-headers bounds their number",
    "--ignore-patterns": "only files that a model needs are downloaded",
    "--model-loader-extra-config": "--load-format says where weights come from",
    "--pt-load-map-location": "weights are read to the host, then copied",
    "--safetensors-prefetch-block-size": "how files are read is no option",
    "--safetensors-prefetch-num-threads": "how files are read is no option",
    "--weight-transfer-config": "the admin routes take new weights (docs/admin.md)",
    "--structured-outputs-config": "grammars are compiled by llguidance; --grammar-* bound them",
}
