"""Tokens by tenant, for the metrics: the tenants with most tokens have series of their own, all others share one.

Which tenants those are is estimated with the Space-Saving algorithm (Metwally et al., 2005) over more tenants than have
series. A token is counted in one series only, so that they add up; a tenant that loses its series to one that has used
more counts among `other` from then on, and starts anew when it comes back, as a counter does that was reset.
"""

from __future__ import annotations

import hashlib
from typing import Literal

MAX_SERIES = 32
MAX_TRACKED = 512
OTHER = "other"
MARGIN = 1.25  # what a tenant must have more than the least of those with a series, so that two do not take turns

TokenKind = Literal["prompt", "output"]


class TenantLabels:
    """Makes what stands for a tenant in metrics, spans and logs: 12 digits that nobody can make of a name who does not
    know the cluster's `secret`, so that one tenant's page of metrics confirms no guess at another's name."""

    def __init__(self, secret: bytes = b"") -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=b"tenant label").digest()

    def of(self, tenant: str) -> str:
        """The label of a tenant's name."""
        return hashlib.blake2b(tenant.encode(), digest_size=6, key=self._key).hexdigest()


class TenantTokens:
    """Counts for one engine."""

    def __init__(self, labels: TenantLabels, max_series: int = MAX_SERIES, max_tracked: int = MAX_TRACKED) -> None:
        self._labels_of = labels
        self.series: dict[tuple[str, ...], float] = {}  # (tenant label, kind) -> tokens
        self._max_series = max_series
        self._max_tracked = max_tracked
        self._totals: dict[str, float] = {}  # tenant label -> tokens, at most a little too many
        self._shown: set[str] = set()
        self._labels: dict[str, str] = {}

    def add(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Count a request of `tenant`."""
        label = self._label(tenant)
        self._track(label, num_prompt_tokens + num_output_tokens)
        name = label if self._has_series(label) else OTHER
        self._count(name, "prompt", num_prompt_tokens)
        self._count(name, "output", num_output_tokens)

    def _label(self, tenant: str) -> str:
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= self._max_tracked:
                self._labels.clear()
            label = self._labels[tenant] = self._labels_of.of(tenant)
        return label

    def _track(self, label: str, num_tokens: int) -> None:
        before = self._totals.get(label)
        if before is None and len(self._totals) >= self._max_tracked:
            least = min(self._totals.keys() - self._shown, key=self._totals.__getitem__)
            before = self._totals.pop(least)
        self._totals[label] = (before or 0.0) + num_tokens

    def _has_series(self, label: str) -> bool:
        if label in self._shown:
            return True
        if len(self._shown) >= self._max_series:
            least = min(self._shown, key=self._totals.__getitem__)
            if self._totals[label] <= MARGIN * self._totals[least]:
                return False
            self._drop(least)
        self._shown.add(label)
        return True

    def _drop(self, label: str) -> None:
        self._shown.remove(label)
        for kind in ("prompt", "output"):
            self.series.pop((label, kind), None)

    def _count(self, name: str, kind: TokenKind, num_tokens: int) -> None:
        place = (name, kind)
        self.series[place] = self.series.get(place, 0.0) + num_tokens
