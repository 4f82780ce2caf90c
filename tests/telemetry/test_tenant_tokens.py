"""Tokens by tenant: the largest have series of their own, all tokens are counted once."""

from __future__ import annotations

import hashlib
import random

from app.telemetry.tenant_tokens import OTHER, TenantLabels, TenantTokens

LABELS = TenantLabels(b"the cluster's")


def test_a_label_confirms_no_guess_without_the_cluster_s_secret() -> None:
    label = LABELS.of("acme")
    assert label == TenantLabels(b"the cluster's").of("acme") != LABELS.of("acme2")
    assert label != TenantLabels(b"another's").of("acme")
    assert len(label) == 12
    plain = {hashlib.new(kind, b"acme").hexdigest()[:12] for kind in ("sha256", "sha512", "blake2b", "md5")}
    assert label not in plain


def test_the_largest_have_series() -> None:
    tokens = TenantTokens(LABELS, max_series=3, max_tracked=20)
    draw = random.Random(1)
    total = {"prompt": 0, "output": 0}
    for _ in range(5000):
        name = draw.choice(["big-1", "big-2", "big-3"]) if draw.random() < 0.8 else f"small-{draw.randrange(500)}"
        tokens.add(name, 10, 5)
        total["prompt"] += 10
        total["output"] += 5
    shown = {label for label, _ in tokens.series}
    assert shown == {OTHER, *map(LABELS.of, ("big-1", "big-2", "big-3"))}
    assert len(tokens._totals) <= 20
    for kind, most in total.items():
        counted = sum(value for (_, of), value in tokens.series.items() if of == kind)
        assert 0.95 * most < counted <= most  # what a tenant had that lost its series is no longer shown


def test_counters_only_rise_while_a_series_lasts() -> None:
    tokens = TenantTokens(LABELS, max_series=2, max_tracked=8)
    draw = random.Random(2)
    before: dict[tuple[str, ...], float] = {}
    for _ in range(2000):
        tokens.add(f"t{draw.randrange(30)}", draw.randrange(50), 1)
        after = dict(tokens.series)
        assert len({label for label, _ in after}) <= 3
        for place in before.keys() & after.keys():
            assert after[place] >= before[place] or place[0] != OTHER
        before = after
