"""``gate series``: runs the gates that are open for each patch, and records what they found.

A patch's state is the base with the series up to that patch. Results go into the ledger one by one, so a run that is killed loses the gate
that was just running and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from .. import components, files, toolchains
from ..cache import Cache, digest_of
from ..console import Console, count_of
from ..errors import BuildError, OpencotiError, PatchError, UsageError
from ..lint import Severity, lint_patch
from ..patchfile import PatchFile
from ..series import BaseTree, SeriesFolder, Workspace
from ..series.base import import_base
from ..series.bisect import Bisection, search
from ..series.chain import build, failure, scratch_repository
from ..sources import UPSTREAM, Tree, Upstream, Workshop
from .ledger import Ledger, Result, Row, State, load, save

LEDGER = Path("gate") / "ledger.yaml"
"""In the repository."""


@dataclass(frozen=True)
class PatchState:
    """The base (tree ``base``) with the series up to ``patch``: tree ``tree``, and ``parent`` without this patch. ``whole`` is the whole series' tree."""

    patch: PatchFile
    base: str
    parent: str
    tree: str
    whole: str
    outcome: str

    @property
    def name(self) -> str:
        """The patch's number and title."""
        return f"{self.patch.number:04d} {self.patch.title}"


class Gate(Protocol):
    """One thing every patch has to prove."""

    @property
    def name(self) -> str:
        """Its word in the ledger and on the command line."""

    @property
    def cumulative(self) -> bool:
        """Whether it judges the tree with all patches up to this one, so that what one breaks stays broken; else it judges the patch alone."""

    def key(self, state: PatchState) -> str:
        """Digest of all that the result depends on."""

    def run(self, state: PatchState) -> Result:
        """Measure. A defect of the patch is a FAILED result; errors of the toolkit pass through."""


def states(folder: SeriesFolder, base: BaseTree, cache: Cache, console: Console) -> tuple[PatchState, ...]:
    """The states of a series in order; computed once for each content of the series. Raises PatchError when a patch does not apply."""
    series, base = folder.load(), base.identified()
    assert base.tree_id is not None
    key = digest_of(["series-trees", 1, base.tree_id, [[patch.number, patch.sha256] for patch in series.patches]])
    place = cache.result("series-trees", key) / "trees.json"
    if not place.is_file():
        with scratch_repository(import_base(folder.name, base, cache, console)) as git:
            chain = build(git, "refs/heads/base", series.patches)
        if chain.failed is not None:
            raise PatchError(f"{failure(*chain.failed)} Run 'invoke patches apply' to see and settle it.", details=chain.failed[1].log)
        with cache.producing("series-trees", key) as fresh:
            (fresh / place.name).write_text(json.dumps([[link.tree, link.outcome.value] for link in chain.links]), "ascii")
    rows = json.loads(place.read_text("ascii"))
    trees = [base.tree_id, *(tree for tree, _ in rows)]
    return tuple(
        PatchState(patch, base.tree_id, trees[index], trees[index + 1], trees[-1], rows[index][1]) for index, patch in enumerate(series.patches)
    )


@dataclass(frozen=True)
class Applies:
    """Every hunk fits with its whole context, at the line it names."""

    name: str = "applies"
    cumulative: bool = False

    def key(self, state: PatchState) -> str:
        """The patch and what it is put on."""
        return digest_of([self.name, state.parent, state.patch.sha256])

    def run(self, state: PatchState) -> Result:
        """The chain was built already; an offset is a pass that is named."""
        return Result(State.PASSED, f"{state.outcome}, tree {state.tree[:12]}")


@dataclass(frozen=True)
class Lints:
    """The rules of patches/README.md that are errors."""

    name: str = "lint"
    cumulative: bool = False

    def key(self, state: PatchState) -> str:
        """The patch and the rules."""
        return digest_of([self.name, state.patch.sha256, files.sha256_file(Path(sys.modules[lint_patch.__module__].__file__ or ""))])

    def run(self, state: PatchState) -> Result:
        """Warnings do not count."""
        findings = lint_patch(state.patch)
        errors = [finding for finding in findings if finding.rule.severity is Severity.ERROR]
        if errors:
            return Result(State.FAILED, f"{errors[0].rule.id}: {errors[0].what}", log="\n".join(f"{item.rule.id} line {item.line}: {item.what}" for item in errors))
        return Result(State.PASSED, count_of(len(findings), "warning") if findings else "no finding")


@dataclass(frozen=True)
class Compiles:
    """The engine of this state builds with the machine's own compiler. The build directory is shared, so a state costs what its patch touches."""

    workshop: Workshop
    upstream: Upstream
    name: str = "compile"
    cumulative: bool = True

    def key(self, state: PatchState) -> str:
        """The state's tree."""
        return digest_of([self.name, state.tree])

    def run(self, state: PatchState) -> Result:
        """Build, or take it from the cache."""
        try:
            component = self.engine(state)
        except BuildError as error:
            return Result(State.FAILED, error.message, log=error.details)
        return Result(State.PASSED, f"program of {component.program.size} bytes, {', '.join(f'{name} {version}' for name, version in component.versions.items())}")

    def tree(self, state: PatchState) -> Tree:
        """A work tree of its own that stands at this state."""
        place = self.workshop.project.build / "gates" / "series" / UPSTREAM
        workspace = Workspace(self.upstream.folder, place, self.upstream.base, self.workshop.cache, self.workshop.console)
        applied = workspace.apply(to=state.patch.number)
        if applied.tree_id != state.tree:
            raise PatchError(f"{place} has tree {applied.tree_id} at {state.patch.number:04d} instead of {state.tree}: remove that folder and run the same command again.")
        return Tree(applied.path, applied.tree_id)

    def engine(self, state: PatchState) -> components.Component:
        """The engine of a state, native toolchain, no CPU libraries."""
        toolchain = toolchains.named("native", self.upstream.fetcher, self.upstream.pins)
        tree = self.tree(state)
        return components.build_engine(
            toolchains.machine_target(),
            tree.path,
            tree.tree_id,
            toolchain,
            identity=self.workshop.project.identity(),
            base_version=self.upstream.pin.version,
            base_commit=self.upstream.pin.commit,
            variants=(),
            cache=self.workshop.cache,
            console=self.workshop.console,
            runner=self.workshop.runner,
            build_root=self.workshop.project.build / "gates" / "series",
        )


@dataclass(frozen=True)
class ChangesNothingWhenOff:
    """``gate off`` between the base and this state, on the whole zoo."""

    compiles: Compiles
    name: str = "off"
    cumulative: bool = True

    def key(self, state: PatchState) -> str:
        """Both trees, the probe, the models (gguf-py is part of the base) and the configurations."""
        from .zoo.writer import WRITER_VERSION  # needs numpy, which not every command of the toolkit has

        folder = self.compiles.workshop.project.root / "gate"
        inputs = [folder / "off.yaml", folder / "zoo.yaml", *sorted(path for path in (folder / "probe").rglob("*") if path.is_file())]
        return digest_of([self.name, state.base, state.tree, WRITER_VERSION, [[path.name, files.sha256_file(path)] for path in inputs]])

    def run(self, state: PatchState) -> Result:
        """Results of models and configurations that were run on the same probe before are taken from the cache."""
        from .off import Off, subjects, summary

        workshop = self.compiles.workshop
        report = Off(workshop, subjects(workshop), patched=self.compiles.tree(state)).run()
        if report.holds:
            return Result(State.PASSED, summary(report).rpartition(", in ")[0])
        return Result(State.FAILED, report.findings[0].text, log="\n".join(finding.text for finding in report.findings))


_TEST = re.compile(r"\btests/engine/test_\w+\.py\b")


@dataclass(frozen=True)
class OwnTests:
    """The test files that the patch's message names, against the engine of the whole series: a patch's test may need a later patch."""

    workshop: Workshop
    name: str = "tests"
    cumulative: bool = False
    _done: dict[str, Result] = field(default_factory=dict)

    def files(self, state: PatchState) -> list[str]:
        """The named files, without repetition."""
        return list(dict.fromkeys(_TEST.findall(" ".join(state.patch.message.body.split()))))

    def key(self, state: PatchState) -> str:
        """The whole series, the named files and what they share."""
        folder = self.workshop.project.root / "tests" / "engine"
        shared = sorted(path for path in folder.glob("*.py") if not path.name.startswith("test_"))
        named = [self.workshop.project.root / name for name in self.files(state)]
        return digest_of([self.name, state.whole, [[path.name, files.sha256_file(path) if path.is_file() else ""] for path in [*named, *shared]]])

    def run(self, state: PatchState) -> Result:
        """Each file once in a run, whoever names it."""
        names = self.files(state)
        if not names:
            return Result(State.FAILED, "its message names no file tests/engine/test_*.py")
        results = [self._done.setdefault(name, self._run(name)) if name not in self._done else self._done[name] for name in names]
        worst = next((result for result in results if result.state is State.FAILED), None)
        return worst or Result(State.PASSED, "; ".join(result.detail for result in results))

    def _run(self, name: str) -> Result:
        root = self.workshop.project.root
        if not (root / name).is_file():
            return Result(State.FAILED, f"{name} is not there")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            done = self.workshop.runner.run((sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", name), cwd=root, env=dict(os.environ), check=False)
            try:
                suites = ElementTree.parse(report).getroot().iter("testsuite")
                count = {what: 0 for what in ("tests", "failures", "errors", "skipped")}
                for suite in suites:
                    for what in count:
                        count[what] += int(suite.get(what, 0))
            except (OSError, ElementTree.ParseError):
                return Result(State.FAILED, f"{name}: pytest ended with exit code {done.code} and wrote no report", log=done.output[-4000:])
        bad = count["failures"] + count["errors"]
        passed = count["tests"] - bad - count["skipped"]
        text = f"{name}: {passed} passed, {count['skipped']} skipped" + (f", {bad} failed" if bad else "")
        if bad or passed == 0 or done.code != 0:
            return Result(State.FAILED, text, log=done.output[-4000:])
        return Result(State.PASSED, text)


def gates(workshop: Workshop, upstream: Upstream) -> tuple[Gate, ...]:
    """All gates of the ledger, cheapest first."""
    compiles = Compiles(workshop, upstream)
    return (Applies(), Lints(), compiles, ChangesNothingWhenOff(compiles), OwnTests(workshop))


def gate_named(known: Sequence[Gate], name: str) -> Gate:
    """Raises UsageError with the names that there are."""
    for gate in known:
        if gate.name == name:
            return gate
    raise UsageError(f"There is no gate {name!r}; there are {', '.join(gate.name for gate in known)}.")


def first_failure(chain: Sequence[PatchState], gate: Gate, console: Console) -> Bisection:
    """The first patch after which a gate fails; the base passes by definition. Raises what the gate raises.

    A cumulative gate is searched by halves: where the whole series passes, an earlier state is not looked at. The others are asked about each
    patch in turn.
    """
    by_number = {state.patch.number: state for state in chain}

    def probe(number: int | None) -> int:
        if number is None:
            return 0
        result = gate.run(by_number[number])
        console.info(f"    {by_number[number].name}: {result.state.value} {result.detail}")
        return 0 if result.state.green else 1

    if gate.cumulative:
        return search(tuple(state.patch for state in chain), probe)
    for runs, state in enumerate(chain, 1):
        if probe(state.patch.number) != 0:
            return Bisection(state.patch, runs=runs)
    return Bisection(None, runs=len(chain))


@dataclass(frozen=True)
class Outcome:
    """What a run did. ``ran`` counts measurements, ``kept`` results that the ledger had already."""

    ledger: Ledger
    ran: int
    kept: int
    failed: tuple[tuple[PatchState, str, Result], ...]


def run(
    chain: Sequence[PatchState],
    gates: Sequence[Gate],
    path: Path,
    *,
    base_version: str,
    console: Console,
    chosen: Callable[[PatchState], bool] = lambda state: True,
    again: Callable[[PatchState, str], bool] = lambda state, gate: False,
) -> Outcome:
    """Measure what is open of the ``chosen`` patches; ``again`` asks for a measurement that the ledger has already.

    Writes ``path`` after each measurement. Raises DataError, DiskError, and whatever a gate raises, with the patch's name in front.
    """
    ledger = load(path)
    base = chain[0].base if chain else ledger.base_tree
    ledger = replace(ledger, base_version=base_version, base_tree=base)
    order = [state.patch.name for state in chain]
    ran = kept = 0
    failed: list[tuple[PatchState, str, Result]] = []
    for number, state in enumerate(chain):
        old = ledger.row(state.patch.name)
        row = Row(state.patch.name, state.patch.sha256, state.tree, dict(old.gates) if old is not None else {})
        for place, gate in enumerate(gates if chosen(state) else (), 1):
            key = gate.key(state)
            result = row.result(gate.name, key)
            if result.state.green and not again(state, gate.name):
                kept += 1
            else:
                console.step(f"[{number * len(gates) + place}/{len(chain) * len(gates)}] {gate.name}: {state.name}")
                try:
                    result = replace(gate.run(state), key=key)
                except OpencotiError as error:
                    raise type(error)(f"{state.name}, gate {gate.name}: {error.message}", details=error.details) from error
                ran += 1
                row = replace(row, gates={**row.gates, gate.name: result})
                ledger = ledger.with_row(row, order)
                save(path, ledger)
            if not result.state.green:
                failed.append((state, gate.name, result))
        ledger = ledger.with_row(row, order)
    save(path, ledger)
    return Outcome(ledger, ran, kept, tuple(failed))
