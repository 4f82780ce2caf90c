"""Features of a step that follow its rows, in the order in which they are called: one file and one line each.

The features that a step's head brings (app/worker/heads: the logits processors and the sampler, the pooler,
token feedback) come after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.backends import KV_CONNECTORS
from app.registry import Registry, load_entry
from app.worker.rows.worker_feature import WorkerFeature

if TYPE_CHECKING:  # the table alone needs nothing of the worker
    from app.worker.features.context import FeatureContext

# Each makes its feature, or gives None where this rank of this engine has no use for it.
WORKER_FEATURES: Registry[Callable[[FeatureContext], WorkerFeature | None]] = Registry(
    "feature",
    {
        "state_copies": "app.worker.features.state_copies:create",
        "token_types": "app.worker.features.token_types:create",
        "query_expansion": "app.worker.features.query_expansion:create",
        "adapters": "app.worker.lora.adapters:create",
        "expert_balance": "app.worker.eplb.balancer:create",
        "prompt_logprobs": "app.worker.features.prompt_logprobs:create",
    },
)


def create_features(context: FeatureContext) -> list[WorkerFeature]:
    """Those that this rank has a use for: the KV connector's half, the table's in its order, the model's."""
    connector = KV_CONNECTORS.load(context.config.kv_connector).worker
    makers = [load_entry(connector)] if connector else []
    makers += [WORKER_FEATURES.load(name) for name in WORKER_FEATURES]
    makers += [load_entry(entry) for entry in context.forward.model.features]
    made = [make(context) for make in makers]
    return [feature for feature in made if feature is not None]
