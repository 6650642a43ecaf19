"""``SOURCE_DATE_EPOCH``: the one time a build may know (reproducible-builds.org's specification of that variable)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .errors import UsageError

VARIABLE = "SOURCE_DATE_EPOCH"
EARLIEST = 315532800
"""1980-01-01 00:00 UTC: no ZIP entry can carry an earlier time."""
LATEST = 4102444799
"""2099-12-31 23:59:59 UTC: build ids have two digits for the year."""


def source_date(environment: Mapping[str, str] = os.environ) -> int | None:
    """Its seconds, or None when it is not set. Raises UsageError for anything but a whole number of that range."""
    wish = environment.get(VARIABLE, "")
    if not wish:
        return None
    if not (wish.isascii() and wish.isdigit() and EARLIEST <= int(wish[:20]) <= LATEST):
        raise UsageError(f"{VARIABLE} is {wish!r}; give seconds since 1970 between {EARLIEST} (1980) and {LATEST} (2099), or unset it.")
    return int(wish)
