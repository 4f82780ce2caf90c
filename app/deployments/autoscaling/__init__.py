"""Decides how many replicas each model has: the arithmetic (`policy`), and the form in which Serve asks for it."""

from __future__ import annotations

# What the application's `autoscaling_policy.policy_function` has to be.
POLICY_FUNCTION = "app.deployments.autoscaling.serve_policy:scale"
