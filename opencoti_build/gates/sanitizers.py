"""The gate "sanitizers": the patched tree, instrumented, under the series' own C++ tests and the engine tests.

The tree is copied to ``build/gates/sanitized-src`` and built there, always in the same folder: a planted defect (the gate's own test) then
costs the compilation of one file, and never touches the work tree. Findings in our code fail the gate; those in upstream's files are
listed, with the reason where gate/sanitizers.yaml knows one. A result belongs to (tree, plant, compiler, data, tests).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..cache import digest_of
from ..console import Meter, human_seconds
from ..errors import DataError, GateError, UsageError
from ..git import Git
from ..sources import Tree, Upstream, Workshop
from . import sanitizer_data
from .findings import Finding, Ours, Owner, added_lines, collect
from .sanitizer_data import Plant, Sanitizer, SanitizerData
from .tree_build import TreeBuild

SCHEMA = 1
KIND = "sanitized"

_PROGRESS = re.compile(r"\[ *(\d+)%\]$")
_FAILED = re.compile(r"^(FAILED|ERROR) (\S+)")
_TOTALS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


@dataclass(frozen=True)
class Run:
    """What one sanitizer saw. ``totals`` counts engine tests by outcome; ``failed`` names tests and programs that did not pass."""

    sanitizer: str
    findings: tuple[Finding, ...]
    totals: Mapping[str, int]
    failed: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema": SCHEMA,
            "sanitizer": self.sanitizer,
            "findings": [finding.to_dict() for finding in self.findings],
            "totals": dict(self.totals),
            "failed": list(self.failed),
            "seconds": self.seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """From ``to_dict``. Raises KeyError, TypeError or ValueError for anything else."""
        if data["schema"] != SCHEMA:
            raise ValueError("another schema")
        return cls(data["sanitizer"], tuple(Finding.from_dict(item) for item in data["findings"]), dict(data["totals"]), tuple(data["failed"]), float(data["seconds"]))


@dataclass(frozen=True)
class Judged:
    """A finding, whose it is, and the reason where it is a known one of upstream's."""

    finding: Finding
    owner: Owner
    known: str = ""

    @property
    def place(self) -> str:
        """Where, for a table."""
        return "; ".join(str(frame) for frame in self.finding.places[:2]) or "no frame inside the tree"


@dataclass(frozen=True)
class SanitizerGate:
    """The gate for one checkout."""

    workshop: Workshop
    upstream: Upstream
    data: SanitizerData
    jobs: int | None = None

    @classmethod
    def load(cls, workshop: Workshop, *, jobs: int | None = None) -> SanitizerGate:
        """Read the data. Raises DataError."""
        return cls(workshop, Upstream.load(workshop), sanitizer_data.load(workshop.project.root / "gate" / "sanitizers.yaml"), jobs)

    def sanitizer(self, name: str) -> Sanitizer:
        """A sanitizer by name; raises UsageError with the known ones."""
        if name not in self.data.sanitizers:
            raise UsageError(f"There is no sanitizer {name!r}; known are {', '.join(self.data.sanitizers)}.")
        return self.data.sanitizers[name]

    def run(self, name: str, *, plant: str = "") -> Run:
        """Build and test under one sanitizer, or take the result from the cache; with ``plant`` its tests alone run, on the planted defect.

        Raises BuildError, GateError (the tests cannot be run), DataError (a plant no longer fits its file).
        """
        sanitizer = self.sanitizer(name)
        planted = self._plant(plant, name)
        with files.lock(self.workshop.project.build / "gates" / ".sanitized.lock", what="the sanitized build"):
            tree = self.upstream.tree()
            source = synchronize(tree, self.workshop.project.build / "gates" / "sanitized-src", planted)
            build = TreeBuild(self.workshop, self.upstream, f"sanitize-{name}", source, self._flags(sanitizer), self.jobs)
            wanted = digest_of([SCHEMA, build.inputs(), repr(sanitizer), repr(self.data), self._tests_digest(), repr(planted)])
            if (known := self._kept(wanted)) is not None:
                return known
            started = time.monotonic()
            programs = () if planted is not None else self.data.programs
            folder = build.make(("llama-app", *programs), description=f"Building the engine, {name} sanitizer")
            self.workshop.console.info(f"    built in {human_seconds(time.monotonic() - started)}")
            run = self._tested(sanitizer, source.path, folder, programs, planted.tests if planted is not None else self.data.tests, started)
            with self.workshop.cache.producing(KIND, wanted) as scratch:
                files.write_text(scratch / "run.json", json.dumps(run.to_dict(), indent=1) + "\n")
            return run

    def ours(self) -> Ours:
        """What of the patched tree is the series'."""
        tree = self.upstream.tree()
        base = self.upstream.patched.base_tree
        diff = Git.open(tree.path).diff(base, tree.tree_id).decode("utf-8", "replace")
        return Ours(added_lines(diff), self.data.outer)

    def judge(self, run: Run) -> tuple[Judged, ...]:
        """Every finding with its owner, ours first."""
        ours = self.ours()
        judged = [Judged(finding, owner := ours.owner(finding), "" if owner is Owner.OURS else self._known(finding)) for finding in run.findings]
        return tuple(sorted(judged, key=lambda item: list(Owner).index(item.owner)))

    # ---- parts ----------------------------------------------------------------------------------------------------------------

    def _plant(self, plant: str, sanitizer: str) -> Plant | None:
        if not plant:
            return None
        if plant not in self.data.plants:
            raise UsageError(f"There is no planted defect {plant!r}; known are {', '.join(self.data.plants)}.")
        found = self.data.plants[plant]
        if found.sanitizer != sanitizer:
            raise UsageError(f"The planted defect {plant!r} is one for the {found.sanitizer} sanitizer, not for {sanitizer}.")
        return found

    def _flags(self, sanitizer: Sanitizer) -> dict[str, str]:
        words = " ".join((*sanitizer.optimise, *sanitizer.compile))
        return {
            "CMAKE_C_FLAGS_RELEASE": words,
            "CMAKE_CXX_FLAGS_RELEASE": words,
            # Instead of the toolchain's own word, which strips symbols.
            "CMAKE_EXE_LINKER_FLAGS": " ".join((*sanitizer.compile, *sanitizer.own, *sanitizer.link)),
            "CMAKE_PROJECT_INCLUDE": (self.workshop.project.root / "gate" / "sanitizers.cmake").as_posix(),
            "GATE_PLAIN_TARGETS": ";".join(entry.what for entry in self.data.plain),
            "GATE_INSTRUMENTATION": ";".join(sanitizer.compile),
            "GATE_OWN_SOURCES": self.data.own_sources,
            "GATE_OWN_WORDS": ";".join(sanitizer.own),
            "LLAMA_BUILD_TESTS": "ON",
        }

    def _tests_digest(self) -> str:
        root = self.workshop.project.root
        listed = sorted((root / "tests" / "engine").glob("*.py"))
        return digest_of([[path.name, files.sha256_file(path)] for path in (*listed, root / "gate" / "sanitizers.cmake", self._model)])

    @property
    def _model(self) -> Path:
        path = self.workshop.project.root / self.data.model
        if not path.is_file():
            raise DataError(f"{self.data.model}, which gate/sanitizers.yaml names, is not there: git checkout restores what belongs to the repository.")
        return path

    def _known(self, finding: Finding) -> str:
        texts = [f"{finding.kind} {frame.file} {frame.function}" for frame in finding.places] or [finding.kind]
        return next((entry.reason for entry in self.data.known if any(re.search(entry.what, text) for text in texts)), "")

    def _kept(self, wanted: str) -> Run | None:
        try:
            return Run.from_dict(json.loads((self.workshop.cache.result(KIND, wanted) / "run.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _tested(self, sanitizer: Sanitizer, source: Path, folder: Path, programs: Sequence[str], tests: Sequence[str], started: float) -> Run:
        scratch = Path(tempfile.mkdtemp(prefix="opencoti-sanitized."))
        try:
            # The engine tests start it as other users as well: everybody may write a report.
            scratch.chmod(0o755)
            reports = scratch / "reports"
            reports.mkdir()
            reports.chmod(0o1777)
            environment = self._environment(sanitizer, scratch, reports, folder)
            failed = [name for name in programs if not self._passes(name, folder, sanitizer, environment)]
            totals, lost = self._engine_tests(sanitizer, environment, tests)
            return Run(sanitizer.name, collect(reports, str(source.resolve())), totals, (*failed, *lost), round(time.monotonic() - started, 1))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _environment(self, sanitizer: Sanitizer, scratch: Path, reports: Path, folder: Path) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "OPENCOTI_TEST_", "OPENCOTI_LLAMAFILE_", "GGML_", "PYTEST_"))}
        suppressions = ""
        if sanitizer.suppress:
            listed = scratch / "suppressions"
            listed.write_text("".join(f"# {entry.reason}\n{entry.what}\n" for entry in sanitizer.suppress), "utf-8")
            suppressions = f":suppressions={listed}"
        for name, value in sanitizer.environment.items():
            environment[name] = f"{value}:log_path={reports / name.partition('_')[0].lower()}{suppressions}"
        return {**environment, "OPENCOTI_TEST_ENGINE": str(folder / "llama"), "OPENCOTI_TEST_MODEL": str(self._model)}

    def _passes(self, name: str, folder: Path, sanitizer: Sanitizer, environment: Mapping[str, str]) -> bool:
        outcome = self.workshop.runner.run((*sanitizer.prefix, folder / name), env=environment, check=False)
        if outcome.code != 0:
            self.workshop.console.warn(f"{name} ended with exit code {outcome.code} under the {sanitizer.name} sanitizer")
        return outcome.code == 0

    def _engine_tests(self, sanitizer: Sanitizer, environment: Mapping[str, str], tests: Sequence[str]) -> tuple[dict[str, int], list[str]]:
        left_out = [word for entry in self.data.left_out for word in ("--deselect", entry.what)]
        argv = (*sanitizer.prefix, sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *left_out, *tests)
        log = self.workshop.project.build / "gates" / f"sanitize-{sanitizer.name}" / "pytest.log"
        with self.workshop.console.progress(f"Engine tests, {sanitizer.name} sanitizer", 100) as meter:
            outcome = self.workshop.runner.run(argv, cwd=self.workshop.project.root, env=environment, check=False, log=log, on_line=lambda line: _advance(meter, line))
        lines = outcome.output.splitlines()
        # 0: all passed, 1: some failed; anything else says that pytest itself did not get through.
        if outcome.code not in (0, 1):
            raise GateError(f"pytest could not run the engine tests (exit code {outcome.code}); the whole log is in {log}.", details="\n".join(lines[-40:]))
        totals = {word: int(number) for number, word in _TOTALS.findall(lines[-1])} if lines else {}
        return totals, [match[2] for line in lines if (match := _FAILED.match(line))]


def _advance(meter: Meter, line: str) -> None:
    if match := _PROGRESS.search(line):
        meter.set(int(match[1]))


def synchronize(tree: Tree, folder: Path, plant: Plant | None) -> Tree:
    """Make ``folder`` a copy of the tree's files, with the plant in; a file that has its bytes already keeps its time.

    Raises DataError when the plant's text is not in its file exactly once.
    """
    wanted: dict[str, Path] = {}
    for here, folders, names in os.walk(tree.path):
        folders[:] = [name for name in folders if name != ".git"]
        for name in names:
            path = Path(here, name)
            wanted[path.relative_to(tree.path).as_posix()] = path
    for name, path in wanted.items():
        data = path.read_bytes()
        if plant is not None and name == plant.file:
            data = planted(data, plant)
        target = folder / name
        if not target.is_file() or target.read_bytes() != data:
            files.write_bytes(target, data, mode=path.stat().st_mode & 0o777 | 0o200)
    if plant is not None and plant.file not in wanted:
        raise DataError(f"gate/sanitizers.yaml: the planted defect {plant.name!r} names {plant.file}, which the patched tree does not have.")
    for here, _, names in os.walk(folder):
        for name in names:
            if Path(here, name).relative_to(folder).as_posix() not in wanted:
                Path(here, name).unlink()
    return Tree(folder, tree.tree_id)


def planted(data: bytes, plant: Plant) -> bytes:
    """A file's bytes with the plant in. Raises DataError."""
    text = plant.text.encode()
    if data.count(text) != 1:
        raise DataError(f"gate/sanitizers.yaml: the text of the planted defect {plant.name!r} is {data.count(text)} times in {plant.file}, not once: adapt it to the file.")
    return data.replace(text, plant.replacement.encode())
