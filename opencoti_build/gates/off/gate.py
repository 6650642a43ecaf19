"""``invoke gate off``: with no flag of ours the patched tree does what the pristine one does, to the last bit.

Both probes run every model of the zoo through every configuration, in processes of their own, without any variable that steers an
engine. What they wrote are hashes; where two differ, that configuration is run again on both sides with everything written out, and
the first difference of each aspect is named. Results of a side are kept by content (probe, model, configuration), so that after a change of
the series only the patched side is run.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ... import files
from ...cache import digest_of
from ...console import Meter, count_of, human_seconds
from ...errors import BuildError, UsageError
from ...sources import Tree, Upstream, Workshop
from .compare import DefaultsComparison, Finding, compare_defaults, differences
from .matrix import Configuration, Matrix, load
from .probe import Probe, build
from .results import Outcome, Result, Results, read_defaults, read_dump, read_results

SCHEMA = 1
"""Raise it when results of a probe mean something else without any input changing."""

KIND = "gate-off"
SIDES = ("pristine", "patched")


@dataclass(frozen=True)
class Subject:
    """A model to run: ``drafter`` drafts for it; ``mtp`` says whether anything does (a drafter, or a NextN block of its own).

    ``extra``: whether the configurations beside the matrix are run too.
    """

    name: str
    path: Path
    drafter: Path | None = None
    mtp: bool = False
    extra: bool = True

    def identity(self) -> list[str]:
        """What its results depend on."""
        return [files.sha256_file(self.path), files.sha256_file(self.drafter) if self.drafter else ""]


@dataclass(frozen=True)
class ModelReport:
    """A model's part of the report: how many configurations were run, refused by the base, and which ones differ."""

    model: str
    run: int
    refused: int
    differing: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The result of the gate. ``added`` are the options that the series brings: program, flags."""

    pristine: str
    patched: str
    backend: str
    models: tuple[ModelReport, ...]
    findings: tuple[Finding, ...]
    added: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def data(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, "holds": self.holds, **asdict(self)}


@dataclass(frozen=True)
class Off:
    """One run of the gate: where, on which models and configurations.

    ``patched`` is the tree to compare with the base (None: the work tree with the whole series on it). ``fresh`` ignores results of
    earlier runs.
    """

    workshop: Workshop
    subjects: Sequence[Subject]
    wishes: Sequence[str] = ()
    patched: Tree | None = None
    jobs: int | None = None
    fresh: bool = False

    @cached_property
    def matrix(self) -> Matrix:
        """The configurations and sizes. Raises DataError."""
        return load(self.workshop.project.root / "gate" / "off.yaml")

    def run(self) -> Report:
        """Build both probes, run them, compare. Raises BuildError, ToolchainError, DataError, UsageError (no such configuration)."""
        console = self.workshop.console
        chosen = {subject.name: self.matrix.chosen(self.wishes, mtp=subject.mtp, extra=subject.extra) for subject in self.subjects}
        if not any(chosen.values()):
            raise UsageError(f"No configuration of these models has {', '.join(self.wishes)}: gate/off.yaml lists what there is.")
        upstream = Upstream.load(self.workshop)
        probes = (
            build(self.workshop, upstream, "pristine", upstream.pristine(), jobs=self.jobs),
            build(self.workshop, upstream, "patched", self.patched or upstream.tree(), jobs=self.jobs),
        )
        started = time.monotonic()
        with self._scratch() as scratch:
            runs = _Runs(self.workshop, self.matrix, scratch, self.fresh)
            defaults = runs.defaults(probes)
            total = 2 * sum(len(items) for items in chosen.values())
            with console.progress("Comparing", total) as meter:
                sides = runs.all(probes, self.subjects, chosen, meter)
            findings = list(defaults.findings)
            backends = [next(iter(sides[side].values())).backend for side in SIDES]
            if backends[0] != backends[1]:
                findings.append(Finding("backend", "what computes", backends[0], backends[1]))
            models = []
            for subject in self.subjects:
                base, ours = sides["pristine"][subject.name], sides["patched"][subject.name]
                report, found = runs.judge(probes, subject, chosen[subject.name], base, ours)
                models.append(report)
                findings += found
        return Report(probes[0].tree_id, probes[1].tree_id, backends[0], tuple(models), tuple(findings), defaults.added, round(time.monotonic() - started, 1))

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        parent = self.workshop.project.build / "gates"
        parent.mkdir(parents=True, exist_ok=True)
        files.remove_stale(parent, "off-run.*")
        with tempfile.TemporaryDirectory(prefix="off-run.", dir=parent) as folder:
            yield Path(folder)


class _Processors:
    """As many threads of probes at once as there are processors."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = count
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wish: int) -> Iterator[None]:
        count = min(wish, self.count)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


@dataclass
class _Runs:
    workshop: Workshop
    matrix: Matrix
    scratch: Path
    fresh: bool
    processors: _Processors = field(default_factory=lambda: _Processors(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))

    # ---- running ------------------------------------------------------------------------------------------------------------------

    def defaults(self, probes: Sequence[Probe]) -> DefaultsComparison:
        """Defaults and options of both trees."""
        texts = []
        for probe in probes:
            out = self.scratch / f"{probe.side}.defaults"
            self._start(probe, ["defaults", "--out", str(out), "--model", "model.gguf"], out)
            texts.append(out.read_text("utf-8", errors="replace"))
        return compare_defaults(read_defaults(texts[0]), read_defaults(texts[1]))

    def all(self, probes: Sequence[Probe], subjects: Sequence[Subject], chosen: Mapping[str, Sequence[Configuration]], meter: Meter) -> dict[str, dict[str, Results]]:
        """The results of both sides by model."""
        parts: list[tuple[Probe, Subject, list[Configuration]]] = []
        for subject in subjects:
            # Those of one thread first: a probe of several waits until it has the processors to itself.
            for threads in sorted({item.threads for item in chosen[subject.name]}):
                group = [item for item in chosen[subject.name] if item.threads == threads]
                parts += [(probe, subject, group) for probe in probes]
        parts.sort(key=lambda part: part[2][0].threads)

        def one(part: tuple[Probe, Subject, list[Configuration]]) -> Results:
            probe, subject, group = part
            found = self.results(probe, subject, group)
            meter.advance(len(group))
            return found

        with ThreadPoolExecutor(self.processors.count) as pool:
            found = list(pool.map(one, parts))
        sides: dict[str, dict[str, Results]] = {side: {} for side in SIDES}
        for (probe, subject, _), results in zip(parts, found, strict=True):
            before = sides[probe.side].get(subject.name)
            sides[probe.side][subject.name] = results if before is None else Results(before.backend, before.results + results.results, before.complete and results.complete)
        return sides

    def results(self, probe: Probe, subject: Subject, group: Sequence[Configuration]) -> Results:
        """The results of one side for a model, from the cache or run now."""
        names = [item.name for item in group]
        key = digest_of({"schema": SCHEMA, "probe": probe.key, "model": subject.identity(), "sizes": self.matrix.sizes, "configurations": names})
        kept = self.workshop.cache.result(KIND, key) / "results.txt"
        if not self.fresh and kept.is_file():
            return read_results(kept.read_text("utf-8"))
        found: list[Result] = []
        backend, log = "", ""
        # A configuration that ends the probe is set aside, and the others go on behind it.
        while names:
            out = self.scratch / f"{probe.side}.{subject.name}.{key[:8]}"
            with self.processors.taken(group[0].threads):
                log = self._start(probe, self._words(subject, out, names), out, check=False)
            if not out.is_file():
                raise BuildError(f"The {probe.side} probe does not start with {subject.name}.", details=log[-4000:])
            part = read_results(out.read_text("utf-8", errors="replace"))
            backend = part.backend
            found += part.results
            names = names[len(part.results) :]
            if part.complete:
                break
            if not part.results:
                raise BuildError(f"The {probe.side} probe ends before its first configuration of {subject.name}.", details=log[-4000:])
            found[-1] = Result(found[-1].configuration, Outcome.CRASHED, reason=_last_words(log))
        done = Results(backend, tuple(found), complete=True)
        if not any(item.outcome is Outcome.CRASHED for item in found):
            with self.workshop.cache.producing(KIND, key) as fresh:
                files.write_text(fresh / "results.txt", out.read_text("utf-8"))
        return done

    def _words(self, subject: Subject, out: Path, names: Sequence[str], dump: Path | None = None) -> list[str]:
        words = ["run", "--out", str(out), "--model", str(subject.path), *self.matrix.words()]
        if subject.drafter is not None:
            words += ["--drafter", str(subject.drafter)]
        if dump is not None:
            words += ["--dump", str(dump)]
        return [*words, *names]

    def _start(self, probe: Probe, words: Sequence[str], out: Path, *, check: bool = True) -> str:
        """Run a probe where nothing of the user's settings reaches it; returns its log."""
        out.unlink(missing_ok=True)
        home = self.scratch / "home"
        home.mkdir(exist_ok=True)
        environment = {"PATH": os.defpath, "HOME": str(home), "LC_ALL": "C", "TZ": "UTC", "TMPDIR": str(home)}
        return self.workshop.runner.run((probe.program, *words), cwd=home, env=environment, check=check).output

    # ---- judging ------------------------------------------------------------------------------------------------------------------

    def judge(self, probes: Sequence[Probe], subject: Subject, chosen: Sequence[Configuration], base: Results, ours: Results) -> tuple[ModelReport, list[Finding]]:
        """Compare both sides of a model; run again, in full, what is needed to name the differences."""
        order = [item.name for item in chosen]
        mine, theirs = ({result.configuration: result for result in side.results} for side in (base, ours))
        differing = [name for name in order if not mine[name].same(theirs[name])]
        findings: list[Finding] = []
        named: set[str] = set()
        for name in differing:
            one, other = mine[name], theirs[name]
            if one.outcome is not other.outcome or one.reason != other.reason:
                if "outcome" not in named:
                    findings.append(Finding("outcome", "how it ends", _ending(one), _ending(other), subject.name, name))
                    named.add("outcome")
            elif new := set(one.differing(other)) - named:
                findings += [found for found in self.explain(probes, subject, one, other) if found.aspect in new]
                named |= new
        run = sum(result.outcome is Outcome.RUN for result in mine.values())
        refused = sum(result.outcome in (Outcome.REFUSED, Outcome.CRASHED) for result in mine.values())
        return ModelReport(subject.name, run, refused, tuple(differing)), findings

    def explain(self, probes: Sequence[Probe], subject: Subject, one: Result, other: Result) -> list[Finding]:
        """Run a configuration on both sides with everything written out, and name the first difference of every aspect."""
        name = one.configuration
        dumps = []
        for probe, before in zip(probes, (one, other), strict=True):
            out, dump = self.scratch / f"{probe.side}.again", self.scratch / f"{probe.side}.dump"
            with self.processors.taken(self.processors.count):
                self._start(probe, self._words(subject, out, [name], dump), out)
            again = read_results(out.read_text("utf-8", errors="replace"))
            if not again.results or not again.results[0].same(before):
                aspect = next(iter(before.differing(again.results[0])), "outcome") if again.results else "outcome"
                return [Finding(aspect, f"the {probe.side} side", "one result", "another from the same program, run again", subject.name, name)]
            dumps.append(read_dump(dump))
            dump.unlink()
        return differences(name, dumps[0], dumps[1], model=subject.name)


def _ending(result: Result) -> str:
    if result.outcome is Outcome.RUN:
        return "a result"
    return f"'{result.outcome.value}: {result.reason}'" if result.reason else f"'{result.outcome.value}'"


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wanted = [line for line in lines if "GGML_ASSERT" in line or "terminate" in line or "what()" in line]
    return (wanted or lines or ["no message"])[-1][:300]


def summary(report: Report) -> str:
    """One sentence about a report that holds."""
    run, refused = sum(item.run for item in report.models), sum(item.refused for item in report.models)
    also = f" ({count_of(refused, 'configuration')} that the base refuses, refused alike)" if refused else ""
    return f"Off means off: {count_of(len(report.models), 'model')}, {count_of(run, 'configuration')} equal to the last bit{also}, in {human_seconds(report.seconds)}."
