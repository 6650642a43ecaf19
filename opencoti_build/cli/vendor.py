"""``invoke vendor``: what is pinned, and bringing, checking and moving it."""

from __future__ import annotations

import json
import sys

from invoke import Collection
from invoke.context import Context

from ..bump import bump as move
from ..console import Console, human_bytes
from ..errors import ChecksumError, OpencotiError, UsageError
from ..vendors import PLATFORMS, Fetcher, Outcome, Pin, Role, State, find_pin, load_pins
from .common import CommandContext, command, context


def _fetcher(made: CommandContext, platform: str, offline: bool) -> Fetcher:
    if platform and platform not in PLATFORMS:
        raise UsageError(f"There is no platform {platform!r}; known are {', '.join(PLATFORMS)}.")
    return Fetcher(made.cache, made.console, made.runner, offline=offline or made.offline, platform=platform or None)


def _chosen(pins: dict[str, Pin], name: str, fetcher: Fetcher) -> list[Pin]:
    """No name: what every build needs here. ``all``: everything pinned for the platform."""
    if name and name != "all":
        return [find_pin(pins, name)]
    return [pin for pin in pins.values() if pin.covers(fetcher.platform) and (name == "all" or pin.role is Role.BUILD)]


@command(name="list", help={"json": "Print JSON instead of a table.", "platform": "Show the state for another platform, such as linux-aarch64."})
def list_pins(c: Context, json: bool = False, platform: str = "") -> None:
    """Show every pin: version, licence, whether it is in the cache, size of the download."""
    made = context(c)
    fetcher = _fetcher(made, platform, offline=True)
    rows = []
    for pin in load_pins(made.project.vendors).values():
        archives = pin.package(fetcher.platform).archives if pin.covers(fetcher.platform) else ()
        rows.append((pin, fetcher.state(pin), archives[0].size if archives else None))
    if json:
        keys = ("name", "version", "kind", "role", "licence", "state", "bytes")
        _print_json([dict(zip(keys, (*_words(pin, state), size), strict=True)) for pin, state, size in rows])
        return
    table = [(*_words(pin, state), human_bytes(size) if size is not None else "-") for pin, state, size in rows]
    Console(sys.stdout).table(f"Pins for {fetcher.platform}", ("name", "version", "kind", "role", "licence", "state", "download"), table, right=(6,))


def _words(pin: Pin, state: State) -> tuple[str, ...]:
    return pin.name, pin.version, pin.kind.value, pin.role.value, pin.licence, state.value


@command(
    optional=("name",),
    help={
        "name": "A pin's name, or 'all'; without it, what every build needs.",
        "offline": "Use the cache alone.",
        "platform": "For another platform, such as windows-x86_64.",
    },
)
def fetch(c: Context, name: str = "", offline: bool = False, platform: str = "") -> None:
    """Download, verify and unpack pins into the cache, and bring anew what is damaged there; prints the folders."""
    made = context(c)
    fetcher = _fetcher(made, platform, offline)
    chosen = _chosen(load_pins(made.project.vendors), name, fetcher)
    failures: list[OpencotiError] = []
    for pin in chosen:
        made.console.step(f"{pin.name} {pin.version}")
        try:
            print(fetcher.fetch(pin))
        except OpencotiError as error:
            if len(chosen) == 1:
                raise
            made.console.error(error.message, error.details)
            failures.append(error)
    if failures:
        raise type(failures[0])(f"{len(failures)} of {len(chosen)} pins could not be fetched; the reasons stand above.")


@command(optional=("name",), help={"name": "A pin's name; without it, everything in the cache."})
def verify(c: Context, name: str = "") -> None:
    """Hash the cached downloads and unpacked folders again; what is wrong is moved aside."""
    made = context(c)
    fetcher = _fetcher(made, "", offline=True)
    pins = load_pins(made.project.vendors)
    findings = [finding for pin in ([find_pin(pins, name)] if name and name != "all" else pins.values()) for finding in fetcher.verify(pin)]
    Console(sys.stdout).table("Cache against pins", ("pin", "what", "result", "detail"), [(f.pin, f.what, f.outcome.value, f.detail) for f in findings])
    if wrong := [finding for finding in findings if finding.outcome is Outcome.WRONG]:
        raise ChecksumError(f"{len(wrong)} of {len(findings)} are not what is pinned: the table says what was found and what to do.")


@command(
    help={
        "name": "The pin's name.",
        "version": "The upstream version; the pinned one completes a pin without a tree digest.",
        "dry-run": "Fetch and compute, show the change, write nothing.",
        "accept-licence": "Go on although the licence's text changed.",
    }
)
def bump(c: Context, name: str, version: str, dry_run: bool = False, accept_licence: bool = False) -> None:
    """Move a pin to another version: fetch, compute sizes and digests, check the licence, write the file."""
    made = context(c)
    find_pin(load_pins(made.project.vendors), name)
    write = not (dry_run or made.dry_run)
    result = move(made.project.vendors / f"{name}.yaml", version, _fetcher(made, "", offline=False), accept_licence=accept_licence, write=write)
    print(result.diff, end="")
    if result.unchecked:
        made.console.warn(f"not checked, because not reachable: {', '.join(result.unchecked)}")
    if not result.diff:
        made.console.success(f"{name} {version}: nothing changes")
    elif write:
        made.console.success(f"{name}: {result.before.version} -> {result.after.version}, written to vendors/{name}.yaml")
    else:
        made.console.success(f"{name}: {result.before.version} -> {result.after.version}, rehearsal, nothing written")


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=1))


ns = Collection("vendor", list_pins, fetch, verify, bump)
