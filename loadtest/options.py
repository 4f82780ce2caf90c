"""Options of the load test on Locust's command line and in its web page; importing this file registers them."""

from __future__ import annotations

import logging
from typing import Any

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner

from loadtest.server import first_model

logger = logging.getLogger(__name__)


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """The options; each may also be an environment variable."""
    parser.add_argument(
        "--model", default="", env_var="MANTA_MODEL", help="model to ask; the first of /v1/models when not given"
    )
    parser.add_argument("--api-key", default="", env_var="MANTA_API_KEY", is_secret=True, help="sent as a bearer token")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, in tokens")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="let every answer reach --max-tokens (a field that vLLM and Manta know; OpenAI refuses it)",
    )
    parser.add_argument("--prompt-words", type=int, default=500, help="words of a long prompt and of a shared prefix")
    parser.add_argument("--turns", type=int, default=5, help="questions in a conversation of a multi-turn user")
    parser.add_argument("--burst", type=int, default=8, help="requests that a bursty user sends at once")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second of the open loop")
    parser.add_argument("--records", default="", include_in_web_ui=False, help="write every answer as a JSON line here")


@events.test_start.add_listener
def choose_model(environment: Environment, **_: Any) -> None:
    """Ask the server for its first model when none is named."""
    options = environment.parsed_options
    if options is None or options.model or isinstance(environment.runner, MasterRunner):
        return
    try:
        options.model = first_model(environment.host or "", options.api_key)
        logger.info("asking model %s", options.model)
    except OSError as error:  # the users' own requests will fail, and be counted
        logger.error("no model to ask: %s; name one with --model", error)
