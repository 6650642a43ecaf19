"""Runs upstream's pytest suite of the server against one engine; every result is kept by content.

A result belongs to (sha256 of the program, the tests of the patched tree, what is softened and skipped, the stand-ins, the plugin, the
test). The plugin (``suite_plugin``) writes a line as soon as a test is over, and it is put into the cache then: a killed run goes on where
it was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from .. import files
from ..cache import digest_of
from ..console import count_of
from ..errors import GateError
from ..project import find_project
from ..sources import Workshop
from . import hub, suite_copy
from .suite_data import ServerData
from .suite_protocol import VARIABLE, matches, read_results

SCHEMA = 1
KIND = "upstream-server"

PLUGIN = "opencoti_build.gates.suite_plugin"


class Outcome(Enum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class TestResult:
    """One test: ``reason`` of a failure (its first line) or a skip, ``where`` the test's line that failed, ``soft`` the noted assertions."""

    __test__ = False

    id: str
    outcome: Outcome
    reason: str = ""
    where: str = ""
    error: str = ""
    soft: tuple[tuple[int, bool], ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> tuple[Any, ...]:
        """What has to be the same on two engines."""
        return (self.outcome, self.where, self.error, self.soft)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TestResult:
        """From a line of the plugin. Raises KeyError, ValueError or TypeError for anything else."""
        soft = tuple((int(line), bool(held)) for line, held in data["soft"])
        return cls(data["id"], Outcome(data["outcome"]), data["reason"], data["where"], data["error"], soft, float(data["seconds"]))

    def to_dict(self) -> dict[str, Any]:
        """The line of the plugin again."""
        return {
            "id": self.id,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "where": self.where,
            "error": self.error,
            "soft": [list(item) for item in self.soft],
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Suite:
    """The suite of one tree against one engine. ``tree`` and ``tree_id`` name where the tests come from; ``name`` is the engine's side."""

    workshop: Workshop
    data: ServerData
    tree: Path
    tree_id: str
    repositories: Mapping[str, Mapping[str, Path]]
    name: str
    program: Path
    workers: int = 2

    def _surroundings(self) -> list[Any]:
        """All that a result depends on beside engine and test."""
        modules = [Path(__file__).with_name(name) for name in ("suite_plugin.py", "suite_protocol.py", "suite_copy.py", "hub.py")]
        served = {repository: {path: hub.object_of(file) for path, file in listed.items()} for repository, listed in self.repositories.items()}
        return [SCHEMA, self.tree_id, self.data.time, list(self.data.soft), list(self.data.fetched), served, [files.sha256_file(module) for module in modules]]

    def _reason(self, name: str) -> str:
        """Why the data leaves a test out, empty if it does not."""
        return next((skip.reason for skip in self.data.skipped if matches(name, skip.test)), "")

    def collect(self) -> tuple[str, ...]:
        """The node ids of all tests, from the cache or asked of pytest. Raises GateError when the suite cannot be collected."""
        cache, wanted = self.workshop.cache, digest_of(self._surroundings())
        directory = cache.result("upstream-collected", wanted)
        if not directory.is_dir():
            with self._session(None) as (folder, results):
                self._pytest(folder, ("--collect-only", "-q"), {0}, None)
                ids = [line["id"] for line in read_results(results)[0]]
            if not ids:
                raise GateError("Upstream's server suite holds no tests: has it moved? gates/suite_copy.py says where it is looked for.")
            with cache.producing("upstream-collected", wanted) as scratch:
                files.write_text(scratch / "tests.json", json.dumps(ids, indent=1) + "\n")
        return tuple(json.loads((directory / "tests.json").read_text("utf-8")))

    def run(self, ids: Sequence[str], *, fresh: bool = False, workers: int | None = None) -> dict[str, TestResult]:
        """Results by node id; what the cache has is not run, unless ``fresh`` (then the cache is neither read nor written)."""
        surroundings = [*self._surroundings(), files.sha256_file(self.program)]
        keys = {name: digest_of([*surroundings, name, self._reason(name)]) for name in ids}
        found: dict[str, TestResult] = {}
        if not fresh:
            found = {name: result for name in ids if (result := self._kept(keys[name])) is not None}
        missing = [name for name in ids if name not in found]
        if not missing:
            return found
        console = self.workshop.console
        if found:
            console.info(f"    {self.name}: {count_of(len(found), 'result')} known, {count_of(len(missing), 'test')} to run")
        with self._session(missing) as (folder, results), console.progress(f"Server suite, {self.name} engine", len(missing)) as meter:
            at = 0

            def take() -> None:
                nonlocal at
                lines, at = read_results(results, at)
                for line in lines:
                    if line["id"] not in keys:
                        continue
                    result = TestResult.from_dict(line)
                    found[result.id] = result
                    if not fresh:
                        self._keep(keys[result.id], result)
                    meter.advance()

            count = self.workers if workers is None else workers
            spread = ("-v", "-p", "xdist.plugin", "-n", str(count), "--dist", "worksteal") if count > 1 and len(missing) > 1 else ("-v",)
            try:
                # 0: all passed, 1: some failed; anything else says that pytest itself did not get through.
                self._pytest(folder, spread, {0, 1}, take)
            finally:
                take()
        if lost := [name for name in missing if name not in found]:
            raise GateError(f"{count_of(len(lost), 'test')} of the server suite gave no result on the {self.name} engine, {lost[0]} among them: see {self._log}.")
        return found

    # ---- one session ----------------------------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.workshop.project.build / "gates" / "server-suite" / self.name

    @property
    def _log(self) -> Path:
        return self._folder / "pytest.log"

    @contextmanager
    def _session(self, select: Sequence[str] | None) -> Iterator[tuple[Path, Path]]:
        """Prepare a copy of the suite and the plugin's plan; yields the tests' folder and the results file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with files.lock(self._folder.parent / f".{self.name}.lock", what=f"the server suite of the {self.name} engine"):
            # Outside any checkout: some of the tests search files, and leave out what git ignores around them.
            files.remove_stale(Path(tempfile.gettempdir()), "opencoti-suite.*")
            scratch = Path(tempfile.mkdtemp(prefix="opencoti-suite."))
            try:
                copy = suite_copy.copy_suite(self.tree, scratch / "root", self.data.soft)
                results = scratch / "results.jsonl"
                plan = {
                    "program": str(self._wrapper(scratch)),
                    "repositories": {repository: {path: str(file) for path, file in listed.items()} for repository, listed in self.repositories.items()},
                    "placed": [repository for repository in self.repositories if repository not in self.data.fetched],
                    "select": list(select) if select is not None else None,
                    "skips": [{"test": skip.test, "reason": skip.reason} for skip in self.data.skipped],
                    "results": str(results),
                    "scratch": str(scratch),
                    "time": self.data.time,
                }
                (scratch / "plan.json").write_text(json.dumps(plan), "utf-8")
                yield copy.tests, results
            finally:
                shutil.rmtree(scratch, ignore_errors=True)

    def _wrapper(self, scratch: Path) -> Path:
        """A program as upstream's tests expect it, one that is nothing but a server: ours is chosen by its first argument."""
        wrapper = scratch / "llama-server"
        quoted = str(self.program).replace("'", "'\\''")
        wrapper.write_text(f"#!/bin/sh\nexec '{quoted}' serve \"$@\"\n", "utf-8")
        wrapper.chmod(0o755)
        return wrapper

    def _pytest(self, tests: Path, words: Collection[str], good: Collection[int], watch: Any) -> None:
        package = str(find_project().root)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "OPENCOTI_", "GGML_", "PYTEST_"))},
            "PYTHONPATH": os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part),
            VARIABLE: str(tests.parents[3] / "plan.json"),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Nothing of what else is installed beside pytest takes part.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        argv: list[str | Path] = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--rootdir", tests, "-c", tests / "pytest.ini", *words, tests / "unit"]
        outcome = self.workshop.runner.run(argv, cwd=tests, env=environment, check=False, log=self._log, on_line=None if watch is None else lambda _: watch())
        if outcome.code not in good:
            tail = "\n".join(outcome.output.splitlines()[-40:])
            raise GateError(f"pytest could not run upstream's server suite (exit code {outcome.code}); the whole log is in {self._log}.", details=tail)

    def _kept(self, wanted: str) -> TestResult | None:
        try:
            return TestResult.from_dict(json.loads((self.workshop.cache.result(KIND, wanted) / "result.json").read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, wanted: str, result: TestResult) -> None:
        with self.workshop.cache.producing(KIND, wanted) as folder:
            files.write_text(folder / "result.json", json.dumps(result.to_dict(), indent=1) + "\n")
