"""The journal of uploads, and what a hub's replies ask to wait."""

from __future__ import annotations

from email.utils import format_datetime
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opencoti_build.cache import Cache
from opencoti_build.publish.journal import Journal
from opencoti_build.publish.policy import Policy, asked_pause

A, B = "a" * 64, "b" * 64
NOW = 1_800_000_000.0


def test_it_remembers(tmp_path: Path) -> None:
    journal = Journal.of(Cache(tmp_path), "http://hub", "owner/engine")
    assert journal.uploaded() == {}
    journal.add(A, 10)
    journal.add(B, 20)
    assert Journal.of(Cache(tmp_path), "http://hub", "owner/engine").uploaded() == {A: 10, B: 20}
    assert Journal.of(Cache(tmp_path), "http://hub", "owner/other").uploaded() == {}
    journal.forget()
    journal.forget()
    assert journal.uploaded() == {}


def test_a_line_that_a_kill_tore_is_not_believed_and_harms_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.add(A, 10)
    # A size that lost its last digits is a size as well: only a finished line counts.
    journal.path.write_bytes(journal.path.read_bytes() + f"{B} 2".encode())
    assert journal.uploaded() == {A: 10}
    journal.add("c" * 64, 30)
    assert journal.uploaded() == {A: 10, "c" * 64: 30}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_whatever_lies_there_it_can_be_read_and_added_to(tmp_path: Path, data: bytes) -> None:
    journal = Journal(tmp_path / "j")
    journal.path.write_bytes(data)
    before = journal.uploaded()
    assert all(len(key) == 64 and size >= 0 for key, size in before.items())
    journal.add(A, 7)
    assert journal.uploaded()[A] == 7


def test_a_journal_that_is_a_folder(tmp_path: Path) -> None:
    assert Journal(tmp_path).uploaded() == {}


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({}, None),
        ({"retry-after": "17"}, 17.0),
        ({"retry-after": " 0 "}, 0.0),
        ({"retry-after": format_datetime(datetime.fromtimestamp(NOW + 90, UTC), usegmt=True)}, 90.0),
        ({"retry-after": format_datetime(datetime.fromtimestamp(NOW - 90, UTC), usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "9" * 400}, None),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": '"api";r=3;t=55'}, None),
    ],
)
def test_what_a_reply_asks_to_wait(headers: dict[str, str], pause: float | None) -> None:
    assert asked_pause(headers, NOW) == pause


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_no_header_is_too_odd(retry: str, limit: str) -> None:
    pause = asked_pause({"retry-after": retry, "ratelimit": limit}, NOW)
    assert pause is None or pause >= 0


def test_pauses_grow_up_to_a_limit() -> None:
    policy = Policy(first_pause=1.0, longest_pause=10.0)
    assert [policy.pause(failures) for failures in (1, 2, 3, 4, 5, 5000)] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
