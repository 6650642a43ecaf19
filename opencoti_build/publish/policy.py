"""How patient publishing is with a hub: what stops it at once, what it waits for and how long.

401 and 403 stop at once. 429 waits as long as the hub says in Retry-After, or as its rate limit needs to be reset. 408, 5xx and broken connections
wait longer each time. What is in vain too often ends with HubUnavailable.
"""

from __future__ import annotations

import email.utils
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol


@dataclass(frozen=True)
class Policy:
    """Times are seconds, sizes bytes."""

    attempts: int = 6
    """Tries of one request, the first included."""
    first_pause: float = 1.0
    longest_pause: float = 60.0
    longest_wait: float = 900.0
    """A longer Retry-After ends the run: a person decides when to come back."""
    connect_timeout: float = 15.0
    reply_timeout: float = 300.0
    """Silence from the hub; a commit of many files takes its time."""
    large: int = 1 << 18
    """From this size on a file is uploaded, and remembered, before the commit is prepared."""
    parallel: int = 4
    """Files that are uploaded at the same time."""

    def pause(self, failures: int) -> float:
        """What to wait after so many failures in a row, the first being 1."""
        return min(self.longest_pause, self.first_pause * 2.0 ** min(failures - 1, 32))


class Clock(Protocol):
    """Time, as far as waiting needs it."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def sleep(self, seconds: float, stop: threading.Event) -> None:
        """Let so much time pass, or less when ``stop`` is set meanwhile."""
        ...


@dataclass(frozen=True)
class SystemClock:
    """The real one."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def sleep(self, seconds: float, stop: threading.Event) -> None:
        """Wait."""
        stop.wait(seconds)


STOP = frozenset({401, 403})
"""Statuses that no second try will change."""

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses of a trouble that may pass."""


_RATE_LIMIT = re.compile(r'"[^"]*"\s*;\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})')


def asked_pause(headers: Mapping[str, str], now: float) -> float | None:
    """The seconds that a reply asks to wait, or None: ``Retry-After`` in seconds or as a date (RFC 9110), or ``RateLimit`` when nothing remains
    (the IETF's draft, as the hub sends it: ``"api";r=0;t=55``)."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    if text:
        try:
            moment = email.utils.parsedate_to_datetime(text)
        except (ValueError, IndexError, OverflowError):
            moment = None
        if moment is not None:
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            return max(0.0, (moment - datetime.fromtimestamp(now, UTC)).total_seconds())
    match = _RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else None
