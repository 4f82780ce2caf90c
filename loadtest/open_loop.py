"""The open loop: requests arrive at `--rate` a second, whatever the server does.

locust -f loadtest/open_loop.py --host http://127.0.0.1:8000 --users 1 --rate 8 --headless --run-time 1m
"""

from __future__ import annotations

from loadtest import options, rows  # they register with Locust
from loadtest.users.open_loop import OpenLoopUser

__all__ = ["OpenLoopUser", "options", "rows"]
