"""Tables whose names are choices in the configuration; they are here because reading them must not import torch (I8).

A new backend is one file and one line of its table: `app/config/`, the command line and their help follow. What else
must be known of one before it is imported stands beside its table, as a set of names. Parsers: app/parser_tables.py.
"""

from __future__ import annotations

from typing import Any

from app.plugins import PluginGroup
from app.registry import Registry

# AttentionOps (app/kernels/attention).
ATTENTION_BACKENDS: Registry[Any] = Registry(
    "attention backend",
    {
        "torch": "app.kernels.attention.reference:OPS",
        "triton": "app.kernels.attention.triton_ops:OPS",
        "flex": "app.kernels.attention.flex:OPS",
        "torch_exact": "app.kernels.attention.fixed_tiles:OPS",
        "triton_exact": "app.kernels.attention.triton_fixed:OPS",
    },
    PluginGroup("attention_backends", "app.kernels.attention:AttentionOps", are_instances=True),
)

EXACT_ATTENTION = {"cpu": "torch_exact", "cuda": "triton_exact"}  # what `auto` means with `deterministic`

# What proposes draft tokens: classes of Proposer (app/worker/spec_decode).
PROPOSERS: Registry[Any] = Registry(
    "proposer",
    {
        "ngram": "app.worker.spec_decode.ngram:NgramProposer",
        "suffix": "app.worker.spec_decode.suffix:SuffixProposer",
        "draft_model": "app.worker.spec_decode.draft_model:DraftModelProposer",
        "eagle": "app.worker.spec_decode.eagle:EagleProposer",
        "eagle3": "app.worker.spec_decode.eagle3:Eagle3Proposer",
        "dflash": "app.worker.spec_decode.block:BlockProposer",
        "dspark": "app.worker.spec_decode.block:BlockProposer",
        "mtp": "app.worker.spec_decode.mtp:MtpProposer",
        "medusa": "app.worker.spec_decode.medusa:MedusaProposer",
        "mlp_speculator": "app.worker.spec_decode.mlp_speculator:MLPSpeculatorProposer",
    },
    PluginGroup("proposers", "app.worker.spec_decode.base:Proposer"),
)

# Kinds of devices: classes of Platform (app/platforms). Of those that are there, `auto` means the last one.
PLATFORMS: Registry[Any] = Registry(
    "device",
    {
        "cpu": "app.platforms.cpu:Cpu",
        "cuda": "app.platforms.cuda:Cuda",
        "rocm": "app.platforms.rocm:Rocm",
    },
)
ON_HOST = frozenset({"cpu"})  # platforms that compute on the host's cores: their workers ask Ray for no GPU

# Classes of QuantMethod (app/quantization), by the names of `quantization` and of checkpoints' `quant_method`;
# several names of a class are one method.
QUANT_METHODS: Registry[Any] = Registry(
    "quantization",
    {
        "fp8": "app.quantization.fp8:Fp8Method",
        "mxfp4": "app.quantization.mxfp4:Mxfp4",
        "fp8_block": "app.quantization.fp8_block:Fp8BlockMethod",
        "int8": "app.quantization.int8:Int8Method",
        "w4": "app.quantization.w4:Int4Method",
        "awq": "app.quantization.awq:Awq",
        "awq_marlin": "app.quantization.awq:Awq",
        "gptq": "app.quantization.gptq:Gptq",
        "gptq_marlin": "app.quantization.gptq:Gptq",
        "fbgemm_fp8": "app.quantization.fp8_checkpoint:Fp8Checkpoint",
        "compressed-tensors": "app.quantization.compressed_tensors:CompressedTensors",
        "auto-round": "app.quantization.auto_round:AutoRound",
        "intel/auto-round": "app.quantization.auto_round:AutoRound",
        "inc": "app.quantization.auto_round:AutoRound",
        "bitsandbytes": "app.quantization.bitsandbytes:BitsAndBytes",
        "gguf": "app.quantization.gguf:GgufMethod",
        "modelopt": "app.quantization.modelopt:ModelOpt",
        "modelopt_fp4": "app.quantization.modelopt:ModelOpt",
        "quark": "app.quantization.quark:Quark",
        "squeezellm": "app.quantization.squeezellm:SqueezeLLM",
        "torchao": "app.quantization.torchao:TorchAo",
    },
    PluginGroup("quantizations", "app.quantization.base:QuantMethod"),
)

# Where weights come from: classes of LoadFormat (app/loading/load_formats).
LOAD_FORMATS: Registry[Any] = Registry(
    "load format",
    {
        "safetensors": "app.loading.load_formats.safetensors:Safetensors",
        "pt": "app.loading.load_formats.pt:Pt",
        "sharded_state": "app.loading.load_formats.sharded_state:ShardedState",
        "gguf": "app.loading.load_formats.gguf:Gguf",
        "dummy": "app.loading.load_formats.dummy:Dummy",
    },
    PluginGroup("load_formats", "app.loading.load_formats.base:LoadFormat"),
)

# What finds adapters by names that nobody has served yet: classes of AdapterResolver (app/checkpoints/adapters).
ADAPTER_RESOLVERS: Registry[Any] = Registry(
    "adapter resolver",
    {
        "directory": "app.checkpoints.adapters.directory_resolver:DirectoryResolver",
        "hub": "app.checkpoints.adapters.hub_resolver:HubResolver",
    },
    PluginGroup("adapter_resolvers", "app.checkpoints.adapters.adapter_resolver:AdapterResolver"),
)

# What keeps KV blocks behind the device's prefix cache, or moves them elsewhere: classes of KVConnector
# (app/engine/kv_connector), of which each names its half in the workers, if it has one.
KV_CONNECTORS: Registry[Any] = Registry(
    "KV connector",
    {
        "host_memory": "app.engine.kv_connector.host_memory:HostMemory",
    },
    PluginGroup("kv_connectors", "app.engine.kv_connector.base:KVConnector"),
)

# Where the workers run: classes of Executor (app/engine/executor).
EXECUTORS: Registry[Any] = Registry(
    "executor",
    {
        "in_process": "app.engine.executor.in_process:InProcessExecutor",
        "local_processes": "app.engine.executor.local_processes:LocalProcessesExecutor",
        "ray_workers": "app.engine.executor.ray_workers:RayWorkersExecutor",
    },
    PluginGroup("executors", "app.engine.executor.base:Executor"),
)
OWN_PROCESS = frozenset({"in_process"})  # executors that run their only worker in the engine's own process

# How steps reach the workers: classes of StepTransport (app/engine/executor/transports).
STEP_TRANSPORTS: Registry[Any] = Registry(
    "step transport",
    {
        "compiled_graph": "app.engine.executor.transports.compiled_graph:CompiledGraphTransport",
        "socket": "app.engine.executor.transports.socket:SocketTransport",
    },
)

# Which replica takes a request: classes of RoutingPolicy (app/deployments/routing/policies).
ROUTING_POLICIES: Registry[Any] = Registry(
    "routing policy",
    {
        "least_outstanding_tokens": "app.deployments.routing.policies.least_outstanding_tokens:LeastOutstandingTokens",
        "power_of_two": "app.deployments.routing.policies.power_of_two:PowerOfTwo",
        "prefix_aware": "app.deployments.routing.policies.prefix_aware:PrefixAware",
        "round_robin": "app.deployments.routing.policies.round_robin:RoundRobin",
        "session_affinity": "app.deployments.routing.policies.session_affinity:SessionAffinity",
    },
    PluginGroup("routing_policies", "app.deployments.routing.policies.base:RoutingPolicy"),
)

# How config.json of a `model_type` that is none of ours becomes one under the names that ModelInfo knows: functions of
# the object to such an object. Ours are read by ModelInfo itself.
MODEL_CONFIGS: Registry[Any] = Registry(
    "config.json of model type", {}, PluginGroup("model_configs", "collections.abc:Callable", are_instances=True)
)

# What edits logits beside our own processors, where `logits_processors` names it: classes of LogitsProcessor.
EXTRA_LOGITS_PROCESSORS: Registry[Any] = Registry(
    "logits processor", {}, PluginGroup("logits_processors", "app.worker.logits_processors.base:LogitsProcessor")
)

# What else is told an engine's figures: classes of StatLogger (app/telemetry/stat_logger.py).
STAT_LOGGERS: Registry[Any] = Registry(
    "stat logger",
    {"log": "app.telemetry.stat_logger:LogLine"},
    PluginGroup("stat_loggers", "app.telemetry.stat_logger:StatLogger"),
)
