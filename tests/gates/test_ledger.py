"""The ledger of the series: what is recorded, what is measured again after which change, and what may be released."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_lab import Lab, copy_lab, hook, make_lab

from opencoti_build.cache import digest_of
from opencoti_build.errors import DataError, OpencotiError, PatchError
from opencoti_build.gates import ledger, series_gate
from opencoti_build.gates.ledger import Ledger, Result, Row, State
from opencoti_build.gates.series_gate import Applies, Lints, PatchState


@dataclass(frozen=True)
class Contains:
    """A gate on the tree: passes while ``holds`` says so; remembers what it was asked about."""

    holds: Callable[[PatchState], bool] = lambda state: True
    name: str = "contains"
    cumulative: bool = True
    asked: list[int] = field(default_factory=list)

    def key(self, state: PatchState) -> str:
        return digest_of([self.name, state.tree])

    def run(self, state: PatchState) -> Result:
        self.asked.append(state.patch.number)
        return Result(State.PASSED, "held") if self.holds(state) else Result(State.FAILED, "did not hold", log="line 1\nline 2")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lab = make_lab(tmp_path_factory.mktemp("lab"))
    for number in (10, 20, 30):
        lab.add(number, f"area: change {number}", hook("src/core.c", f"line {number // 10 * 5}", f"ours {number}\n"))
    return lab.root


@pytest.fixture
def lab(made: Path, tmp_path: Path) -> Lab:
    return copy_lab(made, tmp_path)


def chain(lab: Lab) -> tuple[PatchState, ...]:
    return series_gate.states(lab.folder, lab.base(), lab.cache, lab.console)


def run(lab: Lab, *gates: series_gate.Gate, **options: object) -> series_gate.Outcome:
    return series_gate.run(chain(lab), gates, lab.root / "ledger.yaml", base_version="b1", console=lab.console, **options)  # type: ignore[arg-type]


def test_states_are_the_trees_of_the_series(lab: Lab) -> None:
    states = chain(lab)
    assert [state.patch.number for state in states] == [10, 20, 30]
    assert [state.parent for state in states] == [states[0].base, states[0].tree, states[1].tree]
    assert {state.whole for state in states} == {states[-1].tree}
    assert states[-1].tree == lab.workspace().apply().tree_id
    assert lab.workspace().apply(to=20).tree_id == states[1].tree


def test_nothing_changed_measures_nothing(lab: Lab) -> None:
    gate = Contains()
    first = run(lab, Applies(), Lints(), gate)
    assert (first.ran, first.kept, first.failed) == (9, 0, ())
    written = (lab.root / "ledger.yaml").read_bytes()
    second = run(lab, Applies(), Lints(), gate)
    assert (second.ran, second.kept) == (0, 9)
    assert (lab.root / "ledger.yaml").read_bytes() == written
    assert gate.asked == [10, 20, 30]


def test_a_changed_patch_opens_itself_and_what_stands_on_it(lab: Lab) -> None:
    gate = Contains()
    run(lab, Lints(), gate)
    workspace = lab.workspace()
    workspace.apply(to=20)
    hook("src/core.c", "line 20", "more of 20\n")(lab.tree)
    workspace.refresh()
    gate.asked.clear()
    done = run(lab, Lints(), gate)
    assert gate.asked == [20, 30]
    assert done.ran == 4  # the later patch file changes too: it names the blobs that it was made on


def test_a_changed_gate_opens_its_own_column_alone(lab: Lab) -> None:
    run(lab, Applies(), Contains())
    renewed = Contains(name="contains")
    object.__setattr__(renewed, "key", lambda state: digest_of(["newer sources", state.tree]))
    done = run(lab, Applies(), renewed)
    assert (done.ran, done.kept) == (3, 3)


def test_failure_is_recorded_and_measured_again(lab: Lab) -> None:
    done = run(lab, Contains(lambda state: state.patch.number != 20))
    assert [(state.patch.number, gate, result.detail) for state, gate, result in done.failed] == [(20, "contains", "did not hold")]
    text = (lab.root / "ledger.yaml").read_text()
    assert "state: failed" in text and "line 1" not in text
    mended = Contains()
    assert run(lab, mended).failed == ()
    assert mended.asked == [20]


def test_chosen_patches_and_again(lab: Lab) -> None:
    gate = Contains()
    run(lab, gate, chosen=lambda state: state.patch.number == 30)
    assert gate.asked == [30]
    run(lab, gate)
    assert gate.asked == [30, 10, 20]
    run(lab, gate, again=lambda state, name: state.patch.number == 10)
    assert gate.asked == [30, 10, 20, 10]


def test_killed_run_keeps_what_was_measured(lab: Lab) -> None:
    def stop(state: PatchState) -> bool:
        if state.patch.number == 30:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        run(lab, Contains(stop))
    gate = Contains()
    run(lab, gate)
    assert gate.asked == [30]


def test_error_of_a_gate_names_the_patch(lab: Lab) -> None:
    def fail(state: PatchState) -> bool:
        raise PatchError("The machine is on fire.", details="hot")

    with pytest.raises(PatchError, match=r"^0010 area: change 10, gate contains: The machine is on fire\.$"):
        run(lab, Contains(fail))


def test_dropped_patch_leaves_the_ledger(lab: Lab) -> None:
    run(lab, Contains())
    lab.workspace().apply()
    lab.workspace().drop(20)
    done = run(lab, Contains())
    assert [row.patch[:4] for row in done.ledger.rows] == ["0010", "0030"]


def test_patch_that_does_not_apply_has_no_states(lab: Lab) -> None:
    file = next(lab.folder.path.glob("0020*"))
    file.write_bytes(file.read_bytes().replace(b" line 10\n", b" line 1x\n"))
    with pytest.raises(PatchError):
        chain(lab)


def test_lint_errors_fail_and_warnings_do_not(lab: Lab) -> None:
    file = next(lab.folder.path.glob("0020*"))
    file.write_text(file.read_text().replace("Why: a reason\n", ""))
    done = run(lab, Lints())
    assert [(state.patch.number, result.detail.split(":")[0]) for state, _, result in done.failed] == [(20, "message-section")]


def test_what_keeps_a_series_from_being_released(lab: Lab) -> None:
    gates = (Lints(), Contains(lambda state: state.patch.number != 30))
    made = run(lab, *gates).ledger
    wanted = [(state.patch.name, state.tree, {gate.name: gate.key(state) for gate in gates}) for state in chain(lab)]
    assert [(item.patch[:4], item.gate, item.state) for item in ledger.not_green(made, wanted)] == [("0030", "contains", State.FAILED)]
    other = [(name, "0" * 40, keys) for name, _, keys in wanted]
    assert len(ledger.not_green(made, other)) == 6
    assert ledger.not_green(Ledger(), wanted[:1])[0].state is State.OPEN


@pytest.mark.parametrize("broken", [10, 20, 30, None])
def test_first_patch_that_breaks_a_gate(broken: int | None, lab: Lab) -> None:
    gate = Contains(lambda state: broken is None or state.patch.number < broken)
    found = series_gate.first_failure(chain(lab), gate, lab.console)
    assert (found.first.number if found.first else None) == broken


@pytest.mark.parametrize("broken", [10, 20, 30])
def test_a_gate_on_patches_alone_is_asked_about_each(broken: int, lab: Lab) -> None:
    """The patches after the broken one pass, so halves would not see it."""
    gate = dataclasses.replace(Contains(lambda state: state.patch.number != broken), cumulative=False)
    found = series_gate.first_failure(chain(lab), gate, lab.console)
    assert found.first is not None and found.first.number == broken


# The file


def test_file_round_trip(tmp_path: Path) -> None:
    row = Row("0001-a.patch", "ab" * 32, "1234567890" * 4, {"off": Result(State.PASSED, "240 configurations: ß", "12" * 32), "lint": Result(State.FAILED, "", "0" * 64)})
    made = Ledger("b1", "cd" * 20, (row,))
    ledger.save(tmp_path / "l.yaml", made)
    assert ledger.load(tmp_path / "l.yaml") == made
    assert ledger.load(tmp_path / "absent.yaml") == Ledger()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("schema: 1", "schema: 2"), "this toolkit reads schema 1"),
        (("state: passed", "state: green"), "'green' is not known"),
        (("sha256: ", "sha: "), "the field 'sha256' is missing"),
        (("patches:", "patchs:"), "the field 'patches' is missing"),
        (("detail:", "details:"), "unknown field 'details'; did you mean 'detail'"),
    ],
)
def test_damaged_file_is_named(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    ledger.save(path, Ledger("b1", "cd" * 20, (Row("0001-a.patch", "ab" * 32, "ef" * 20, {"off": Result(State.PASSED, "x", "ac" * 32)}),)))
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(DataError, match=words):
        ledger.load(path)


@settings(max_examples=100, deadline=None)
@given(junk=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["schema", "base", "patches", "gates", "patch"]), inner, max_size=4)))
def test_anything_else_is_refused_with_our_error(junk: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    import json

    path = tmp_path_factory.mktemp("junk") / "l.yaml"
    path.write_text(json.dumps(junk))
    with pytest.raises(OpencotiError):
        ledger.load(path)
