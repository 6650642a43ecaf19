"""The gate "upstream's own tests": its C++ tests built from the patched tree, its server suite against the patched and the base's engine.

A test that fails on both in the same place is upstream's matter, or that of a stand-in model: it is listed. One that fails on the
patched tree alone fails the gate. A difference counts only if it stays when both are asked again: a test that does not agree with
itself is listed as unstable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .. import assemble, files, ninja
from ..console import count_of
from ..sources import Tree, Upstream, Workshop
from . import native_suite, server_suite, standins, suite_data
from .hub import object_of
from .native_suite import NativeResult, NativeTest
from .server_suite import Suite, TestResult
from .suite_data import SuiteData
from .suite_protocol import matches
from .tree_build import SharedTreeBuild, TreeBuild, registered_tests

AGAIN = 2
"""How many more times both engines are asked where they differ."""

TEST_FLAGS = {"LLAMA_BUILD_TESTS": "ON", "GGML_OPENMP": "ON"}
"""OpenMP is the base's own default. Its tests ask for more threads than a small machine has, and those of the base's other thread pool wait for
each other in a loop: what takes seconds would take half an hour."""


class Verdict(Enum):
    """What a test says about the series."""

    PASSED = "passed"
    SKIPPED = "skipped"
    BASE = "fails on the base as well"
    REGRESSION = "fails with the series only"
    DIFFERS = "fails in another way with the series"
    REPAIRED = "fails on the base only"
    UNSTABLE = "does not agree with itself"

    @property
    def refused(self) -> bool:
        """Whether the gate fails for it."""
        return self in (Verdict.REGRESSION, Verdict.DIFFERS)


@dataclass(frozen=True)
class Judged:
    """One test of one suite (``native`` or ``server``); ``note`` says why it is skipped or how it failed."""

    suite: str
    name: str
    verdict: Verdict
    note: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"suite": self.suite, "test": self.name, "verdict": self.verdict.name.lower(), "note": self.note, "seconds": self.seconds}


@dataclass(frozen=True)
class Report:
    """The outcome of the gate. ``complete`` is False when only a part was asked for."""

    base: str
    tree: str
    judged: tuple[Judged, ...]
    complete: bool

    @property
    def refused(self) -> tuple[Judged, ...]:
        """What fails the gate."""
        return tuple(item for item in self.judged if item.verdict.refused)

    def of(self, verdict: Verdict) -> tuple[Judged, ...]:
        """All tests with this verdict."""
        return tuple(item for item in self.judged if item.verdict is verdict)

    def counts(self, suite: str) -> str:
        """``120 passed, 3 skipped`` of one suite."""
        numbers = {verdict: sum(item.suite == suite and item.verdict is verdict for item in self.judged) for verdict in Verdict}
        return ", ".join(f"{number} {verdict.name.lower()}" for verdict, number in numbers.items() if number)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": 1, "base": self.base, "tree": self.tree, "complete": self.complete, "passed": not self.refused, "tests": [item.to_dict() for item in self.judged]}


@dataclass(frozen=True)
class UpstreamGate:
    """The gate for one checkout. ``jobs`` limits compilers and tests at once (None: as many as the machine allows)."""

    workshop: Workshop
    upstream: Upstream
    data: SuiteData
    jobs: int | None = None

    @classmethod
    def load(cls, workshop: Workshop, *, jobs: int | None = None) -> UpstreamGate:
        """Read the data. Raises DataError."""
        return cls(workshop, Upstream.load(workshop), suite_data.load(workshop.project.root / "gate" / "upstream.yaml"), jobs)

    def run(self, only: str = "", suites: Sequence[str] = ("native", "server")) -> Report:
        """Run what is asked for: ``only`` is a name or pattern of tests. Raises GateError when a suite cannot be run at all."""
        models = standins.ensure(self.workshop, self.upstream, self.data.standins, self.data.pieces)
        judged: list[Judged] = []
        if "native" in suites:
            judged += self._native(models, only)
        if "server" in suites:
            judged += self._server(models, only)
        complete = not only and set(suites) >= {"native", "server"}
        return Report(self.upstream.pin.version, self.upstream.patched.tree_id, tuple(judged), complete)

    # ---- C++ tests ------------------------------------------------------------------------------------------------------------

    def _native(self, models: Mapping[str, tuple[Path, ...]], only: str) -> list[Judged]:
        tree = self.upstream.tree()
        build = SharedTreeBuild(self.workshop, self.upstream, "tests-patched", tree, TEST_FLAGS, self.jobs)
        tests, left_out = self._planned(build, models, only)
        results = self._results(build, tests)
        judged = [Judged("native", name, Verdict.SKIPPED, reason) for name, reason in left_out]
        failed = [test for test in tests if results[test.name].outcome is not native_suite.Outcome.PASSED]
        rivals: dict[str, NativeResult] = {}
        if failed:
            self.workshop.console.info(f"    {count_of(len(failed), 'test')} failed: the same is asked of the base")
            base = SharedTreeBuild(self.workshop, self.upstream, "tests-pristine", self.upstream.pristine(), TEST_FLAGS, self.jobs)
            names = {test.name for test in failed} | {other.name for test in failed for other in tests if set(other.provides) & set(test.needs)}
            counterparts, _ = self._planned(base, models, "")
            rivals = self._results(base, [test for test in counterparts if test.name in names])
        for test in tests:
            judged.append(judge_native(results[test.name], rivals.get(test.name)))
        return judged

    def _planned(self, build: TreeBuild, models: Mapping[str, tuple[Path, ...]], only: str) -> tuple[list[NativeTest], list[tuple[str, str]]]:
        """The tests that run, those they need included, and those left out with their reasons."""
        build.make((), description="Configuring the tests")
        native = self.data.native
        registered = registered_tests(build.work)
        first = {name: found[0] for name, found in models.items()}
        digests = {name: object_of(file) for name, file in first.items()}
        tests = native_suite.plan(native, registered, work=build.work, models=first, digests=digests)
        wanted = [test for test in tests if not only or matches(test.name, only)]
        needs = {need for test in wanted for need in test.needs}
        chosen = [test for test in tests if test in wanted or needs & set(test.provides)]
        left_out = [(test.name, reason) for test in registered if (reason := native.reason(test.name)) is not None and (not only or matches(test.name, only))]
        return chosen, left_out

    def _results(self, build: TreeBuild, tests: Sequence[NativeTest]) -> dict[str, NativeResult]:
        if not tests:
            return {}
        programs = build.make(sorted({test.target for test in tests}), description=f"Building upstream's C++ tests ({build.name.partition('-')[2]})")
        jobs = self.jobs or ninja.default_jobs()
        return native_suite.run(
            tests,
            tree_id=build.tree.tree_id,
            programs=programs,
            data=self.data.native,
            cache=self.workshop.cache,
            console=self.workshop.console,
            logs=build.directory / "logs",
            jobs=jobs,
        )

    # ---- server suite ---------------------------------------------------------------------------------------------------------

    def _server(self, models: Mapping[str, tuple[Path, ...]], only: str) -> list[Judged]:
        tree = self.upstream.tree()
        repositories = {repository: {path: part_of(models, standin) for path, standin in listed.items()} for repository, listed in self.data.server.repositories.items()}
        patched = self._suite(tree, repositories, "patched")
        ids = [name for name in patched.collect() if not only or matches(name, only)]
        if not ids:
            return []
        pristine = self._suite(tree, repositories, "pristine")
        ours, theirs = patched.run(ids), pristine.run(ids)
        return [judge_server(ours[name], theirs[name]) for name in ids if ours[name].verdict == theirs[name].verdict] + self._disputed(
            patched, pristine, [name for name in ids if ours[name].verdict != theirs[name].verdict], ours, theirs
        )

    def _suite(self, tree: Tree, repositories: Mapping[str, Mapping[str, Path]], side: str) -> Suite:
        engine = assemble.engine(self.workshop, "native", toolchain="native", pristine=side == "pristine", jobs=self.jobs)
        workers = min(self.jobs or ninja.default_jobs(), 4)
        return Suite(self.workshop, self.data.server, tree.path, tree.tree_id, repositories, side, engine.program_path, workers)

    def _disputed(self, patched: Suite, pristine: Suite, names: Sequence[str], ours: Mapping[str, TestResult], theirs: Mapping[str, TestResult]) -> list[Judged]:
        """Ask both again, one test at a time, where they differ."""
        if not names:
            return []
        self.workshop.console.info(f"    {count_of(len(names), 'test')} ended differently: both engines are asked again")
        mine: dict[str, list[TestResult]] = {name: [ours[name]] for name in names}
        others: dict[str, list[TestResult]] = {name: [theirs[name]] for name in names}
        for _ in range(AGAIN):
            for suite, kept in ((patched, mine), (pristine, others)):
                for name, result in suite.run(names, fresh=True, workers=1).items():
                    kept[name].append(result)
        return [judge_disputed(mine[name], others[name]) for name in names]


def part_of(models: Mapping[str, tuple[Path, ...]], standin: str) -> Path:
    """The file that ``NAME`` or ``NAME/PART`` (from 1) means."""
    name, _, part = standin.partition("/")
    return models[name][int(part or 1) - 1]


def judge_native(ours: NativeResult, theirs: NativeResult | None) -> Judged:
    """A C++ test; ``theirs`` is the base's result where ours failed."""
    if ours.outcome is native_suite.Outcome.PASSED:
        return Judged("native", ours.name, Verdict.PASSED, seconds=ours.seconds)
    note = ours.outcome.value if ours.outcome is native_suite.Outcome.TIMED_OUT else f"exit code {ours.code}"
    alike = theirs is not None and theirs.outcome is not native_suite.Outcome.PASSED
    return Judged("native", ours.name, Verdict.BASE if alike else Verdict.REGRESSION, f"{note}\n{ours.output}".rstrip(), ours.seconds)


def judge_server(ours: TestResult, theirs: TestResult) -> Judged:
    """A server test that ended alike on both engines."""
    verdict = {server_suite.Outcome.PASSED: Verdict.PASSED, server_suite.Outcome.SKIPPED: Verdict.SKIPPED, server_suite.Outcome.FAILED: Verdict.BASE}[ours.outcome]
    return Judged("server", ours.id, verdict, _note(ours) if verdict is not Verdict.PASSED else "", ours.seconds + theirs.seconds)


def judge_disputed(ours: Sequence[TestResult], theirs: Sequence[TestResult]) -> Judged:
    """A server test that ended differently, from all runs of both engines."""
    seconds = sum(result.seconds for result in (*ours, *theirs))
    if {result.verdict for result in ours} & {result.verdict for result in theirs}:
        return Judged("server", ours[0].id, Verdict.UNSTABLE, f"with the series: {_ways(ours)}; on the base: {_ways(theirs)}", seconds)
    if all(result.outcome is server_suite.Outcome.PASSED for result in ours) and any(result.outcome is server_suite.Outcome.FAILED for result in theirs):
        return Judged("server", ours[0].id, Verdict.REPAIRED, f"on the base: {_note(theirs[0])}", seconds)
    verdict = Verdict.DIFFERS if all(result.outcome is server_suite.Outcome.FAILED for result in theirs) else Verdict.REGRESSION
    return Judged("server", ours[0].id, verdict, f"with the series: {_note(ours[0])}; on the base: {_note(theirs[0])}", seconds)


def _note(result: TestResult) -> str:
    if result.outcome is server_suite.Outcome.SKIPPED:
        return result.reason
    soft = ", ".join(f"line {line} {'holds' if held else 'does not hold'}" for line, held in result.soft)
    if result.outcome is server_suite.Outcome.PASSED:
        return f"passed ({soft})" if soft else "passed"
    return f"{result.where or 'before the test'}: {result.reason}"


def _ways(results: Iterable[TestResult]) -> str:
    return ", then ".join(f"{result.outcome.value}{' at ' + result.where if result.where else ''}" for result in results)


DOCUMENT = Path("docs", "evaluations", "upstream-tests.md")


def document(report: Report) -> str:
    """The report for docs/evaluations: what ran, what was left out and why. The same for the same verdicts."""
    lines = [
        "# Upstream's own tests",
        "",
        f"Written by `invoke gate upstream`. Base {report.base}, patched tree `{report.tree[:12]}`.",
        "",
        "| suite | result |",
        "| --- | --- |",
        f"| C++ tests (`tests/`) | {report.counts('native')} |",
        f"| server suite (`tools/server/tests`) | {report.counts('server')} |",
        "",
        "Models that upstream downloads are replaced by stand-ins of the same architecture with random weights (`gate/upstream.yaml`). What a",
        "test asks of the original model's knowledge is noted on both engines and has to be the same on both.",
    ]
    lines += _section("Left out", report.of(Verdict.SKIPPED), "reason")
    lines += _section("Fails on the base as well", report.of(Verdict.BASE), "how")
    lines += _section("Refused", report.refused, "how")
    return "\n".join(lines) + "\n"


def _section(title: str, items: Sequence[Judged], column: str) -> list[str]:
    if not items:
        return []
    grouped: dict[tuple[str, str], list[str]] = {}
    for item in items:
        grouped.setdefault((_short(item), item.note.splitlines()[0] if item.note else ""), []).append(item.name)
    rows = [f"| `{name}`{f' ({len(names)} cases)' if len(names) > 1 else ''} | {note.replace('|', '/')} |" for (name, note), names in grouped.items()]
    return ["", f"## {title}", "", f"| test | {column} |", "| --- | --- |", *rows]


def _short(item: Judged) -> str:
    """File and function: the cases of a test share a line."""
    return item.name.removeprefix("unit/").partition("[")[0]


def show(report: Report, table: Callable[..., None]) -> None:
    """Print the counts, what was left out and why, and everything that did not simply pass."""
    table("Upstream's own tests", ("suite", "result"), [("C++ tests", report.counts("native") or "not asked for"), ("server suite", report.counts("server") or "not asked for")])
    for verdict in (Verdict.SKIPPED, Verdict.BASE, Verdict.UNSTABLE, Verdict.REPAIRED, Verdict.DIFFERS, Verdict.REGRESSION):
        grouped: dict[tuple[str, str], int] = {}
        for item in report.of(verdict):
            where = (_short(item), item.note.splitlines()[0] if item.note else "")
            grouped[where] = grouped.get(where, 0) + 1
        if grouped:
            table(verdict.value.capitalize(), ("test", "cases", "why"), [(name, str(count), note) for (name, note), count in grouped.items()], right=(1,))


def write_document(workshop: Workshop, report: Report) -> Path | None:
    """Write docs/evaluations/upstream-tests.md after a complete run; None after a partial one."""
    if not report.complete:
        return None
    path = workshop.project.root / DOCUMENT
    files.write_text(path, document(report))
    return path
