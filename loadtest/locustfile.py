"""The closed loop: so many users, each of whom waits for an answer before asking again.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --users 16 --spawn-rate 4

opens Locust's page at http://127.0.0.1:8089; with `--headless --run-time 1m` it runs in the terminal. All kinds of
users are mixed by their weights; name some to have only those (`... ChatUser BurstyUser`). `--help` lists the options.
"""

from __future__ import annotations

from loadtest import options, rows  # they register with Locust
from loadtest.users.bursty import BurstyUser
from loadtest.users.chat import ChatUser
from loadtest.users.long_prompt import LongPromptUser
from loadtest.users.multi_turn import MultiTurnUser
from loadtest.users.shared_prefix import SharedPrefixUser

__all__ = ["BurstyUser", "ChatUser", "LongPromptUser", "MultiTurnUser", "SharedPrefixUser", "options", "rows"]
