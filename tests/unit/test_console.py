from __future__ import annotations

import io

import pytest

from opencoti_build.console import Console, Mode, human_bytes, human_seconds, mode_from_environment


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (11_180_000, "10.7 MiB"), (1_700_000_000, "1.58 GiB"), (5 << 30, "5.00 GiB")])
def test_sizes_for_people(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (12.4, "12 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")])
def test_durations_for_people(seconds, text):
    assert human_seconds(seconds) == text


def test_quiet_wins_over_plain_over_the_terminal():
    assert mode_from_environment({}, is_terminal=True) is Mode.RICH
    assert mode_from_environment({}, is_terminal=False) is Mode.PLAIN
    assert mode_from_environment({"OPENCOTI_PLAIN": "1"}, is_terminal=True) is Mode.PLAIN
    assert mode_from_environment({"OPENCOTI_PLAIN": "1", "OPENCOTI_QUIET": "1"}, is_terminal=True) is Mode.QUIET
    assert mode_from_environment({"OPENCOTI_QUIET": "0"}, is_terminal=True) is Mode.RICH


def test_plain_text_has_no_escape_codes_and_keeps_brackets():
    stream = io.StringIO()
    console = Console(stream, mode=Mode.PLAIN)
    console.step("building [linux-x86_64]")
    console.error("no such file: [a]", "expected [1]")
    console.table("Parts", ["part", "state"], [["[x]", "built"]])
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "==> building [linux-x86_64]" in text and "no such file: [a]" in text and "expected [1]" in text and "[x]" in text


def test_quiet_keeps_warnings_and_errors_only():
    stream = io.StringIO()
    console = Console(stream, mode=Mode.QUIET)
    console.info("news")
    console.success("done")
    console.warn("look")
    console.error("wrong")
    assert stream.getvalue().splitlines() == ["warning: look", "error: wrong"]


def test_plain_progress_tells_the_eta_now_and_then():
    now = [0.0]
    stream = io.StringIO()
    console = Console(stream, mode=Mode.PLAIN, clock=lambda: now[0])
    with console.progress("hashing", total=100 << 20, unit="bytes") as meter:
        for _ in range(10):
            now[0] += 6
            meter.advance(10 << 20)
    lines = stream.getvalue().splitlines()
    assert lines[0].strip() == "hashing: 20.0 MiB of 100.0 MiB, 12 s, ETA 48 s"
    assert len(lines) == 5


@pytest.mark.parametrize("mode", list(Mode))
def test_progress_of_an_unknown_total_works_in_every_mode(mode):
    with Console(io.StringIO(), mode=mode).progress("waiting") as meter:
        meter.advance()
        meter.set(5, 10, "nearly")


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    """LC_ALL=C and a path with an umlaut: a line, not a defect."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    Console(stream, mode=Mode.PLAIN).success("für")
    assert b"f\\xfcr" in raw.getvalue()
