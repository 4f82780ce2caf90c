"""Ray's settings for a cluster that `manta serve` starts by itself: its timers are made for many nodes and short tasks.

A cluster that is joined has its own. What is in the environment already stays as it is.
"""

from __future__ import annotations

RAY_SETTINGS = {
    # Serve's controller looks after replicas so often, in seconds. By default 0.1, a third of an idle server's CPU; so
    # a replica's death is seen, and a scaling decision made, up to 0.4 s later.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_task_events_report_interval_ms": "0",  # none: `ray list tasks` would show calls between Serve's actors
    "RAY_event_stats": "0",  # counts of what Ray's own event loops do, for its debug files
    # How often a raylet looks: by default ten times a second each.
    "RAY_raylet_report_resources_period_milliseconds": "500",
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",  # for its autoscaler, which has nothing to scale
    "REPORTER_UPDATE_INTERVAL_MS": "15000",  # how often a node's agent measures it, for Ray's own metrics
    "LOG_NAME_UPDATE_INTERVAL_S": "2",  # how soon a new process's output comes to the console
}
