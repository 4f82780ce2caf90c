"""On which terms a request is served: its class, its deadline, and whether it has been sent before.

The class is the tenant's own unless the body asks for another (OpenAI's `service_tier`), at most the best that the
configuration lets the tenant have. What runs without its client (batches, background responses) is bulk work. A
deadline is what the header `x-request-timeout-ms` says, else what the SDKs of OpenAI and Anthropic send: the time that
they wait for an answer, or for the next piece of a stream, before they give up.
"""

from __future__ import annotations

import math
import re
import time

from starlette.requests import Request

from app.config.admission import CLASS_NAMES, AdmissionConfig, ClassName
from app.errors import DeadlineError, InvalidRequestError
from app.records.request import Deadline, ServiceClass

TIMEOUT_HEADER = "x-request-timeout-ms"
SDK_TIMEOUT_HEADERS = ("x-stainless-read-timeout", "x-stainless-timeout")  # seconds
RETRY_HEADER = "x-stainless-retry-count"
DETACHED = "is_detached"  # in a request's state: nobody waits for its answer
BEGAN = "began_s"  # in a request's state: when it came (monotonic)

_TIERS: dict[str, ClassName] = {
    "priority": "interactive",
    "fast": "interactive",
    "default": "default",
    "scale": "default",
    "flex": "bulk",
}
_TIER_OF: dict[str, str] = {"interactive": "priority", "default": "default", "bulk": "flex"}
_COUNT = re.compile(r"[0-9]{1,6}")
# What a library writes for a value that was never given: as Python, JavaScript or JSON call it, or an object's repr.
_UNMEANT = re.compile(r"|not_?given|none|null|undefined|<.*>", re.IGNORECASE)


class ServiceTerms:
    """Those of one application."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._classes = {name: ServiceClass(name, getattr(config, name).share) for name in CLASS_NAMES}

    def service_class(self, request: Request, tier: str | None) -> ServiceClass:
        """The class of a request that asks for `tier`."""
        if _is_detached(request):
            return self._classes["bulk"]
        own = self._config.of_tenant(request.state.tenant)
        asked = _TIERS.get(tier or "auto", own.service_class)
        return self._classes[max(asked, own.best_class, key=CLASS_NAMES.index)]

    def num_retries(self, request: Request) -> int:
        """Returns how often the client says that it has sent the request before."""
        text = _meant(request, RETRY_HEADER) or "0"
        if not _COUNT.fullmatch(text):
            raise InvalidRequestError("must be a whole number", param=RETRY_HEADER)
        return int(text)

    def deadline(self, request: Request, is_stream: bool) -> Deadline | None:
        """When the request has to have ended, counted from now; None: whenever it does."""
        asked_s, until_first_token = self._asked_s(request), False
        if asked_s is None and not _is_detached(request):
            asked_s, until_first_token = self._sdk_s(request), is_stream
        if asked_s is None:
            asked_s, until_first_token = self._config.default_timeout_s, False
        if asked_s is None:
            return None
        left_s = asked_s - (time.monotonic() - getattr(request.state, BEGAN, time.monotonic()))
        if left_s <= 0:
            raise DeadlineError(f"the request's deadline of {asked_s:g} s passed before it could be queued")
        return Deadline(left_s, until_first_token)

    def _asked_s(self, request: Request) -> float | None:
        text = request.headers.get(TIMEOUT_HEADER)
        if text is None:
            return None
        most_ms = self._config.max_timeout_s * 1e3
        asked_ms = _number(text)
        if asked_ms is None or not 1 <= asked_ms <= most_ms:
            raise InvalidRequestError(f"must be milliseconds, from 1 to {most_ms:.0f}", param=TIMEOUT_HEADER)
        return asked_ms / 1e3

    def _sdk_s(self, request: Request) -> float | None:
        """Clients do not know that they send it, so a long time is as good as none."""
        for name in SDK_TIMEOUT_HEADERS:
            if (text := _meant(request, name)) is None:
                continue
            seconds = math.inf if text.lower() in ("inf", "infinity") else _number(text)
            if seconds is None or seconds < 0:
                raise InvalidRequestError("must be seconds", param=name)
            return seconds if 0 < seconds <= self._config.max_timeout_s else None
        return None


def tier_of(service_class: ServiceClass) -> str:
    """OpenAI's name of the tier by which a request is served."""
    return _TIER_OF[service_class.name]


def _is_detached(request: Request) -> bool:
    return bool(getattr(request.state, DETACHED, False))


def _meant(request: Request, name: str) -> str | None:
    """The value of a header that SDKs add unasked; None where it is absent, or stands for no value."""
    text = request.headers.get(name, "").strip()
    return None if _UNMEANT.fullmatch(text) else text


def _number(text: str) -> float | None:
    try:
        value = float(text) if len(text) <= 32 else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
