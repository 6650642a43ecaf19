"""A pytest plugin for upstream's server tests: local models in place of downloads, a record of every result, no change of the tree.

It is loaded with ``-p opencoti_build.gates.suite_plugin`` and told what to do by the JSON file that the variable ``GATE_SUITE`` names::

    {"program": PATH, "repositories": {REPOSITORY: {PATH IN IT: FILE}}, "placed": [REPOSITORY], "select": [NODE ID] | null,
     "skips": [{"test": PATTERN, "reason": TEXT}], "results": FILE, "scratch": FOLDER, "time": SECONDS}

In every process that runs tests it starts a hub (``hub.serving``) and points the engine, the tests' own downloads and the addresses in
their requests at it; gives every server a free port; ends a test after ``time`` seconds. Where the tests run, each result is one line of
JSON in ``results``: ``{"id", "outcome", "reason", "where", "error", "soft", "seconds"}``. ``where`` is the test's own line that failed
(``FILE:LINE``), ``soft`` lists the assertions that depend on a model's knowledge as ``[line, held]`` (see ``suite_copy``).
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from opencoti_build.gates import hub
from opencoti_build.gates.suite_protocol import VARIABLE, matches

UPSTREAM_HUB = "https://huggingface.co/"
"""What addresses in upstream's tests begin with."""


class Plan:
    """The JSON file, read."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text("utf-8"))
        self.program: str = data["program"]
        self.repositories: dict[str, dict[str, Path]] = {name: {inner: Path(file) for inner, file in files.items()} for name, files in data["repositories"].items()}
        self.placed: list[str] = data["placed"]
        self.select: set[str] | None = set(data["select"]) if data["select"] is not None else None
        self.skips: list[dict[str, str]] = data["skips"]
        self.results = Path(data["results"])
        self.scratch = Path(data["scratch"])
        self.time: float = data["time"]

    def reason(self, node: str) -> str | None:
        """Why a test is left out, if it is."""
        return next((skip["reason"] for skip in self.skips if matches(node, skip["test"])), None)


class SuitePlugin:
    """The hooks; one object a process."""

    def __init__(self, plan: Plan, config: pytest.Config) -> None:
        self.plan = plan
        self.config = config
        self.soft: list[list[Any]] = []
        self._stack = contextlib.ExitStack()
        # With xdist the first process only hands out work.
        self.works = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
        self.reports = not hasattr(config, "workerinput")
        self._seen: dict[str, dict[str, Any]] = {}

    # ---- surroundings ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Set the surroundings up, before any test module is imported."""
        for name in [name for name in os.environ if name.startswith(("LLAMA_", "OPENCOTI_", "GGML_", "AIP_"))]:
            del os.environ[name]
        vars(builtins)["soft_assertion"] = self._soft_assertion
        if not self.works:
            return
        address = self._stack.enter_context(hub.serving(self.plan.repositories))
        home = Path(tempfile.mkdtemp(prefix="suite.", dir=self.plan.scratch))
        self._stack.callback(shutil.rmtree, home, ignore_errors=True)
        hub.place(home / "models", {name: self.plan.repositories[name] for name in self.plan.placed})
        os.environ.update(
            MODEL_ENDPOINT=address,
            LLAMA_CACHE=str(home / "models"),
            LLAMA_SERVER_BIN_PATH=self.plan.program,
            # Tiny models gain nothing from a second thread, and lose much where threads wait for each other on a busy machine.
            LLAMA_ARG_THREADS="1",
            XDG_CONFIG_HOME=str(home),
            NO_PROXY="127.0.0.1,localhost,::1",
        )
        _redirect_requests(address)
        self.address = address

    def pytest_sessionstart(self) -> None:
        """The conftest is loaded: its helpers can be changed."""
        if not self.works:
            return
        utils = sys.modules.get("utils")
        if utils is None:
            raise pytest.UsageError("upstream's conftest.py no longer imports its utils: the plugin has to be adapted")
        utils.ServerPreset.load_all = staticmethod(lambda: None)
        process = utils.ServerProcess
        process.__init__ = _with_free_port(process.__init__)
        for name in ("make_request", "make_stream_request"):
            setattr(process, name, _with_local_addresses(getattr(process, name), self.address))

    def pytest_unconfigure(self) -> None:
        """Stop the hub, remove the model cache."""
        self._stack.close()

    def _soft_assertion(self, line: int, holds: Callable[[], Any]) -> None:
        """What stands for an assertion about a model's knowledge: noted, not enforced."""
        self.soft.append([line, bool(holds())])

    # ---- selection ------------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what the data or upstream leaves out; keep what was asked for."""
        kept = [item for item in items if self.plan.select is None or item.nodeid in self.plan.select]
        dropped = [item for item in items if item not in kept] if len(kept) != len(items) else []
        for item in kept:
            reason = self.plan.reason(item.nodeid)
            if reason is None and item.get_closest_marker("slow"):
                reason = "upstream marks it slow: it needs a model of several GB"
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
        if dropped:
            self.config.hook.pytest_deselected(items=dropped)
            items[:] = kept
        if self.config.option.collectonly and self.reports:
            for item in items:
                self._write({"id": item.nodeid})

    # ---- results --------------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """End a test that hangs."""
        self.soft = []

        def expired(*_: object) -> NoReturn:
            raise TimeoutError(f"the test took longer than {self.plan.time:.0f} s")

        before = signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, self.plan.time)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note, in the process that has the traceback, where the test failed."""
        report = yield
        facts: dict[str, Any] = {}
        if call.excinfo is not None and report.outcome == "failed":
            own = [entry for entry in call.excinfo.traceback if Path(str(entry.path)).parent.name == "unit"]
            facts = {"where": f"{Path(str(own[-1].path)).name}:{own[-1].lineno + 1}" if own else "", "error": call.excinfo.typename}
        if report.when == "call":
            facts["soft"] = self.soft
        report.user_properties.append(("gate", facts))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the phases of a test; write its line when the last one is over."""
        if not self.reports:
            return
        entry = self._seen.setdefault(report.nodeid, {"id": report.nodeid, "outcome": "passed", "reason": "", "where": "", "error": "", "soft": [], "seconds": 0.0})
        facts: Any = next((value for name, value in reversed(report.user_properties) if name == "gate"), {})
        entry["seconds"] = round(entry["seconds"] + report.duration, 3)
        entry["soft"] = facts.get("soft", entry["soft"])
        if report.outcome == "skipped" and entry["outcome"] == "passed":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            entry.update(outcome="skipped", reason=reason.removeprefix("Skipped: "))
        elif report.outcome == "failed" and entry["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message if crash is not None else str(report.longrepr)).splitlines()
            entry.update(outcome="failed", reason=message[0][:300] if message else "", where=facts.get("where", ""), error=facts.get("error", ""))
        if report.when == "teardown":
            self._write(self._seen.pop(report.nodeid))

    def _write(self, line: dict[str, Any]) -> None:
        with self.plan.results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _with_free_port(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any) -> None:
        original(self)
        self.server_port = free_port()

    return __init__


def _with_local_addresses(original: Callable[..., Any], address: str) -> Callable[..., Any]:
    """Requests whose body names a file of the public hub name the local one."""

    def ask(self: Any, method: str, path: str, data: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, method, path, _local(data, address), *args, **kwargs)

    return ask


def _local(value: Any, address: str) -> Any:
    if isinstance(value, str):
        return address + "/" + value.removeprefix(UPSTREAM_HUB) if value.startswith(UPSTREAM_HUB) else value
    if isinstance(value, list):
        return [_local(item, address) for item in value]
    if isinstance(value, dict):
        return {key: _local(item, address) for key, item in value.items()}
    return value


def _redirect_requests(address: str) -> None:
    import requests

    original = requests.Session.request

    def request(self: requests.Session, method: str, url: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, method, _local(url, address), *args, **kwargs)

    requests.Session.request = request  # type: ignore[method-assign, assignment]


def _fake_wget() -> types.ModuleType:
    """A module ``wget`` that downloads with requests, which the plugin sends to the local hub."""
    module = types.ModuleType("wget")

    def download(url: str, out: str) -> str:
        import requests

        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
        target = Path(out)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}")
        part.write_bytes(answer.content)
        part.replace(target)
        return out

    vars(module)["download"] = download
    return module


def _no_openai() -> types.ModuleType:
    """Where the OpenAI client is not installed: its tests are skipped, the other tests of the same files run."""
    module = types.ModuleType("openai")

    class OpenAI:
        def __init__(self, *_: object, **__: object) -> None:
            pytest.skip("the Python package openai is not installed")

    vars(module)["OpenAI"] = OpenAI
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before upstream's conftest is imported: stand-ins for modules that it and the tests import."""
    if VARIABLE not in os.environ:
        return
    sys.modules["wget"] = _fake_wget()
    if importlib.util.find_spec("openai") is None:
        sys.modules["openai"] = _no_openai()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin where it was asked for."""
    if (path := os.environ.get(VARIABLE)) is None:
        return
    plugin = SuitePlugin(Plan(Path(path)), config)
    plugin.start()
    config.pluginmanager.register(plugin, "gate-suite")
