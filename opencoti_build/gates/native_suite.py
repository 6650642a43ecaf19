"""Runs the C++ tests of a tree: several at once within a memory limit, each with limits of its own, results kept by content.

A result belongs to (tree, test, sha256 of its program, stand-ins, arguments, limits); a test with the same of all that is not run again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from .. import files
from ..cache import Cache, digest_of
from ..console import Console, count_of
from ..errors import GateError
from .suite_data import Limits, NativeData
from .tree_build import RegisteredTest

SCHEMA = 1
KIND = "upstream-native"

ADDRESS_SPACE = 8
"""How many times its memory limit a test may map: threads and memory maps take addresses without taking memory."""

_TAIL = 30
"""Lines of a failing test's output that a result keeps."""


class Outcome(Enum):
    """How a test ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class NativeTest:
    """A test ready to run. ``arguments`` are for the program; ``inputs`` say the same without a path of this machine, for the key."""

    name: str
    target: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    limits: Limits
    provides: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class NativeResult:
    """``output`` is the end of what it printed, for a test that did not pass; ``seconds`` is how long it took when it ran."""

    name: str
    outcome: Outcome
    code: int
    seconds: float
    output: str = ""


def plan(data: NativeData, registered: Sequence[RegisteredTest], *, work: Path, models: Mapping[str, Path], digests: Mapping[str, str]) -> tuple[NativeTest, ...]:
    """The tests to run, in order: those the tree registers but for the skipped, then the extra ones.

    ``models`` are the files of the stand-ins by name, ``digests`` their sha256. Paths in a registered command that end in the name of a
    replaced model become that stand-in.
    """
    tests = []
    for test in registered:
        if data.reason(test.name) is not None:
            continue
        arguments, inputs = [], []
        for word in test.command[1:]:
            if (standin := data.models.get(Path(word).name)) is not None:
                arguments.append(str(models[standin]))
                inputs.append(digests[standin])
            else:
                arguments.append(word)
                # Sources and build directory lie side by side.
                inputs.append(word.replace(str(work.parent), "BUILD"))
        tests.append(_made(data, test.name, test.target, arguments, inputs, test.folder or work / "tests", test.environment, models, digests, test.provides, test.needs))
    for extra in data.extra:
        tests.append(_made(data, extra.name, extra.target, extra.arguments, extra.arguments, work / "tests", (), models, digests))
    return tuple(tests)


def _made(
    data: NativeData,
    name: str,
    target: str,
    arguments: Sequence[str],
    inputs: Sequence[str],
    folder: Path,
    environment: Sequence[str],
    models: Mapping[str, Path],
    digests: Mapping[str, str],
    provides: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> NativeTest:
    variables = dict(item.partition("=")[::2] for item in environment) | {"LLAMACPP_TEST_MODELFILE": str(models[data.model])}
    words = (*inputs, *environment, digests[data.model])
    return NativeTest(name, target, tuple(arguments), words, folder, variables, data.limit(name), tuple(provides), tuple(needs))


def key(tree_id: str, test: NativeTest, program: str) -> str:
    """The key of a result."""
    return digest_of([SCHEMA, tree_id, test.name, program, list(test.inputs), test.limits.memory, test.limits.time])


def run(
    tests: Sequence[NativeTest],
    *,
    tree_id: str,
    programs: Path,
    data: NativeData,
    cache: Cache,
    console: Console,
    logs: Path,
    jobs: int,
) -> dict[str, NativeResult]:
    """Results of all ``tests`` by name; what the cache has is not run. ``programs`` is the folder of the built programs.

    A test that makes files for others (a CTest fixture) runs before them, and again whenever one of them has to run.
    """
    found: dict[str, NativeResult] = {}
    missing: list[tuple[NativeTest, str]] = []
    for test in tests:
        wanted = key(tree_id, test, files.sha256_file(programs / test.target))
        if (result := _kept(cache, wanted)) is not None:
            found[test.name] = result
        else:
            missing.append((test, wanted))
    needed = {need for test, _ in missing for need in test.needs}
    setups = [test for test in tests if needed & set(test.provides)]
    setup_names = {test.name for test in setups}
    setup_keys = {test.name: wanted for test, wanted in missing}
    if found:
        console.info(f"    {count_of(len(found), 'result')} of C++ tests known, {count_of(len(missing), 'test')} to run")
    budget = _Budget(data.memory)
    logs.mkdir(parents=True, exist_ok=True)

    def execute(test: NativeTest) -> NativeResult:
        with budget.holding(test.limits.memory):
            return run_one(test, programs / test.target, logs / f"{test.name}.log")

    def keep(test: NativeTest, result: NativeResult) -> None:
        found[test.name] = result
        if (wanted := setup_keys.get(test.name)) is not None:
            _keep(cache, wanted, result)

    with console.progress("Upstream's C++ tests", len(setups) + sum(test.name not in setup_names for test, _ in missing)) as meter:
        for test in setups:
            keep(test, execute(test))
            meter.advance()
        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            pending = {pool.submit(execute, test): test for test, _ in missing if test.name not in setup_names}
            try:
                for future in as_completed(pending):
                    keep(pending[future], future.result())
                    meter.advance()
            except BaseException:
                for future in pending:
                    future.cancel()
                _end_all()
                raise
    return found


class _Budget:
    """Memory that running tests share. A test larger than all of it runs alone."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        """Wait for ``amount`` MiB, hold them while the block runs."""
        amount = min(amount, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= amount)
            self._free -= amount
        try:
            yield
        finally:
            with self._changed:
                self._free += amount
                self._changed.notify_all()


_running: set[subprocess.Popen[bytes]] = set()


def run_one(test: NativeTest, program: Path, log: Path) -> NativeResult:
    """Run one test to its end or its limit; its output goes to ``log``. Raises GateError when it cannot be started."""
    started = time.monotonic()
    limit = test.limits.memory * ADDRESS_SPACE << 20
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "OPENCOTI_", "GGML_"))}
    # Threads that wait give the processor away.
    environment["OMP_WAIT_POLICY"] = "passive"
    # A test that compares with Jinja's own implementation starts "python3".
    environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", os.defpath)))

    def restrict() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    test.folder.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                [str(program), *test.arguments],
                cwd=test.folder,
                env={**environment, **test.environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=os.name != "nt",
                preexec_fn=restrict if os.name != "nt" else None,
            )
        except OSError as error:
            raise GateError(f"Cannot start {program}: {error.strerror or error}.") from error
        _running.add(process)
        try:
            code = process.wait(test.limits.time)
            outcome = Outcome.PASSED if code == 0 else Outcome.FAILED
        except subprocess.TimeoutExpired:
            _end(process)
            code, outcome = process.wait(), Outcome.TIMED_OUT
        finally:
            _running.discard(process)
    seconds = round(time.monotonic() - started, 2)
    result = NativeResult(test.name, outcome, code, seconds)
    return result if outcome is Outcome.PASSED else replace(result, output=_tail(log))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if os.name == "nt":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _end_all() -> None:
    for process in list(_running):
        _end(process)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-_TAIL:])


def _kept(cache: Cache, wanted: str) -> NativeResult | None:
    try:
        data = json.loads((cache.result(KIND, wanted) / "result.json").read_text("utf-8"))
        return NativeResult(data["name"], Outcome(data["outcome"]), data["code"], data["seconds"], data["output"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(cache: Cache, wanted: str, result: NativeResult) -> None:
    with cache.producing(KIND, wanted) as folder:
        files.write_text(folder / "result.json", json.dumps({"name": result.name, "outcome": result.outcome.value, "code": result.code, "seconds": result.seconds, "output": result.output}, indent=1) + "\n")
