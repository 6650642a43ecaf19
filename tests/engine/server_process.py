"""A real server for the tests: starts the engine, waits until it is healthy, talks JSON to it, stops it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEALTHY_WITHIN = 180.0  # seconds; a cold model on a busy machine
STOPS_WITHIN = 30.0


@dataclass(frozen=True)
class Reply:
    """One HTTP answer; an error status is an answer too."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON; ``ValueError`` if it is none."""
        return json.loads(self.text)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def clean_environment(directory: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without anything that configures an engine: variables, config files, a model cache. Then ``extra``."""
    prefixes = ("LLAMA_", "OPENCOTI_", "GGML_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    environment |= {"XDG_CONFIG_HOME": str(directory), "LLAMA_CACHE": str(directory / "cache"), "NO_COLOR": "1"}
    return environment | dict(extra or {})


def _die_with_parent() -> None:
    """Runs in the child: a killed test run leaves no server behind (prctl(2), PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class ServerProcess:
    """The engine with ``--server`` on a free port of 127.0.0.1, as a context manager.

    ``model`` may be None (a router). ``env`` is added to an environment that configures nothing. RuntimeError, with the end of
    the log, if the engine ends or does not get healthy.
    """

    def __init__(
        self,
        engine: Path,
        model: Path | None,
        *flags: str,
        env: Mapping[str, str] | None = None,
        mode: tuple[str, ...] = ("--server",),
    ) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="engine-test-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = Path(self._home.name) / "log"
        self._env = clean_environment(Path(self._home.name), env)
        chosen = ("--model", str(model)) if model is not None else ()
        self.argv = [str(engine), *mode, "--host", "127.0.0.1", "--port", str(self.port), *chosen, *flags]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the engine wrote so far."""
        return self._log.read_text(errors="replace")

    def stop(self) -> int:
        """End the engine (SIGTERM, later SIGKILL) and return its exit code."""
        assert self._process is not None, "not started"
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOPS_WITHIN)
            except subprocess.TimeoutExpired:
                self._process.kill()
        code = self._process.wait()
        self._home.cleanup()
        return code

    def get(self, path: str, timeout: float = 60) -> Reply:
        return self._ask(urllib.request.Request(self.url + path), timeout)

    def post(self, path: str, body: Any, timeout: float = 300) -> Reply:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}), timeout)

    def complete(self, prompt: str | list[int], n_predict: int = 16, **more: Any) -> dict[str, Any]:
        """A greedy completion; AssertionError with the answer if the server refuses."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1} | more
        reply = self.post("/completion", body)
        assert reply.status == 200, reply.text
        return reply.json

    @staticmethod
    def _ask(request: urllib.request.Request, timeout: float) -> Reply:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, dict(error.headers), error.read().decode())

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + HEALTHY_WITHIN
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise RuntimeError(f"the engine ended with {code}:\n{self.log[-4000:]}")
            try:
                if self.get("/health", timeout=5).status == 200:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(0.05)
        raise RuntimeError(f"the engine was not healthy within {HEALTHY_WITHIN:.0f} s:\n{self.log[-4000:]}")


def serve(engine: Path, model: Path | None, *flags: str, env: Mapping[str, str] | None = None) -> ServerProcess:
    """``with serve(engine, model, "--parallel", "2") as server:``"""
    return ServerProcess(engine, model, *flags, env=env)


def run_engine(engine: Path, *arguments: str, home: Path, env: Mapping[str, str] | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run the engine to its end with an environment that configures nothing; ``home`` is an empty directory."""
    return subprocess.run(
        [str(engine), *arguments],
        input=text,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=clean_environment(home, env),
        timeout=300,
        check=False,
    )
