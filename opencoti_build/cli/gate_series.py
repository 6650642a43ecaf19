"""``invoke gate series``: every patch through every gate, recorded in the ledger."""

from __future__ import annotations

import json as json_module
import sys

from invoke.context import Context

from ..console import Console, count_of
from ..errors import GateError, UsageError
from ..gates import series_gate
from ..gates.ledger import Ledger, State
from ..sources import Upstream
from .common import command, context


@command(
    help={
        "patch": "Only this patch's number, such as 0010; may be given several times.",
        "gate": "Only this gate; may be given several times.",
        "again": "Measure what the ledger has already, too.",
        "check": "Measure nothing: say what is open, and fail if anything is.",
        "json": "Print the ledger as JSON instead of a table.",
    },
    iterable=["patch", "gate"],
)
def series(c: Context, patch: list[str], gate: list[str], again: bool = False, check: bool = False, json: bool = False) -> None:
    """For every patch: it applies, lints, compiles, changes nothing when off, and its own tests pass. Runs only what is open."""
    made = context(c)
    upstream = Upstream.load(made)
    chain = series_gate.states(upstream.folder, upstream.base, made.cache, made.console)
    known = series_gate.gates(made, upstream)
    gates = [series_gate.gate_named(known, name) for name in gate] or list(known)
    numbers = {f"{state.patch.number:04d}": state for state in chain}
    wanted = [text.zfill(4) for text in patch]
    if absent := [number for number in wanted if number not in numbers]:
        raise UsageError(f"There is no patch {absent[0]}; the series has {', '.join(numbers)}.")
    path = made.project.root / series_gate.LEDGER
    if check:
        ledger = series_gate.load(path)
        ran = 0
    else:
        done = series_gate.run(
            chain,
            gates,
            path,
            base_version=upstream.pin.version,
            console=made.console,
            chosen=lambda state: not wanted or f"{state.patch.number:04d}" in wanted,
            again=lambda state, name: again,
        )
        ledger, ran = done.ledger, done.ran
        for state, name, result in done.failed:
            made.console.warn(f"{state.name}: {name}: {result.detail}")
            for line in result.log.splitlines()[-20:]:
                made.console.info(f"    {line}")
    rows = [(state, {item.name: _state(ledger, state, item) for item in known}) for state in chain]
    if json:
        print(json_module.dumps(ledger.to_dict(), indent=1))
    else:
        Console(sys.stdout).table(
            f"Ledger of {upstream.pin.name} {upstream.pin.version}",
            ["patch", *(item.name for item in known)],
            [[state.name, *(states[item.name].value for item in known)] for state, states in rows],
        )
    open_ones = [(state, name, found) for state, states in rows for name, found in states.items() if not found.green and _asked(state, name, wanted, gate)]
    if open_ones:
        state, name, found = open_ones[0]
        raise GateError(f"{count_of(len(open_ones), 'gate')} not green, the first: {state.name}, {name} ({found.value}).")
    made.console.success(
        f"{count_of(len(wanted) or len(chain), 'patch', 'patches')} green"
        + (f" as far as {', '.join(item.name for item in gates)} can tell" if gate else "")
        + f", {count_of(ran, 'measurement')} made now; {series_gate.LEDGER.as_posix()}"
    )


def _asked(state: series_gate.PatchState, name: str, patches: list[str], gates: list[str]) -> bool:
    return (not patches or f"{state.patch.number:04d}" in patches) and (not gates or name in gates)


def _state(ledger: Ledger, state: series_gate.PatchState, gate: series_gate.Gate) -> State:
    row = ledger.row(state.patch.name)
    return row.result(gate.name, gate.key(state)).state if row is not None and row.tree == state.tree else State.OPEN
