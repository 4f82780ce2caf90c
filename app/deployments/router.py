"""The Router deployment: says which replica shall take a request. One small call per request, never on the token path.

Engine replicas push their load here (fire and forget); ingresses ask, with a small time budget, and choose by
themselves when no answer comes. So a dead Router costs placement quality, never a request.
"""

from __future__ import annotations

from app.config import RouterConfig
from app.deployments.load_book import LoadBook
from app.deployments.policies import create_policy
from app.deployments.policies.base import RouteQuery
from app.deployments.wire import LoadReport


class Router:
    """One load book per model."""

    def __init__(self, config: RouterConfig, models: tuple[str, ...]) -> None:
        self._books = {model: LoadBook(create_policy(config.policy)) for model in models}

    async def heartbeat(self, report: LoadReport) -> None:
        """Take an engine replica's load report."""
        self._books[report.model].report(report)

    async def route(
        self,
        model: str,
        num_prompt_tokens: int,
        max_tokens: int,
        block_hashes: tuple[bytes, ...] = (),
    ) -> str | None:
        """Id of the replica that shall serve the request; None when the Router knows none."""
        return self._books[model].route(RouteQuery(num_prompt_tokens, max_tokens, block_hashes))
