"""Features of a step that follow its rows, in the order in which they are called: one file and one line each.

The features that a step's head brings (app/engine/worker/heads: the logits processors and the sampler, the pooler,
token feedback) come after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from app.engine.row_feature import RowFeature
from app.registry import Registry

if TYPE_CHECKING:  # the table alone needs nothing of the worker
    from app.engine.worker.features.context import FeatureContext

# Each makes its feature, or gives None where this rank of this engine has no use for it.
ROW_FEATURES: Registry[Callable[[FeatureContext], RowFeature | None]] = Registry(
    "row feature",
    {
        "kv_transfer": "app.engine.worker.host_tier.host_tier:create",
        "token_types": "app.engine.worker.features.token_types:create",
        "expert_balance": "app.engine.worker.eplb.balancer:create",
        "prompt_logprobs": "app.engine.worker.features.prompt_logprobs:create",
    },
)


def create_row_features(context: FeatureContext) -> list[RowFeature]:
    """Those of the table that this rank has a use for, in its order."""
    made = (ROW_FEATURES.load(name)(context) for name in ROW_FEATURES)
    return [feature for feature in made if feature is not None]
