"""Runs an engine for a gate: as a server on 127.0.0.1, or one of its commands to the end, with nothing from outside that configures it."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .. import files
from ..errors import EngineError, UsageError

HEALTHY_WITHIN = 300.0
"""Seconds until a server must answer: a large model on a slow disk, on a busy machine."""

STOPS_WITHIN = 15.0
"""Seconds between asking a server to end and ending it."""

ANSWERS_WITHIN = 1800.0
"""Seconds for one answer: a long prompt on a small machine."""

_TAIL = 4000
"""Characters of the log that an error carries."""

_FOREIGN = ("LLAMA_", "OPENCOTI_", "GGML_")
"""Prefixes of the variables that steer an engine."""


@dataclass(frozen=True)
class Engine:
    """An engine file; ``name`` is what people call it, ``sha256`` what results are kept by."""

    name: str
    path: Path
    sha256: str

    @classmethod
    def at(cls, path: Path, name: str = "") -> Engine:
        """The engine at ``path``. Raises UsageError when there is none."""
        if not path.is_file():
            raise UsageError(f"{path} is no file: give the path of an engine or of a single file.")
        return cls(name or path.name, path.resolve(), files.sha256_file(path))

    @property
    def words(self) -> tuple[str, ...]:
        """How it is started: a single file begins as a Windows program, and elsewhere a shell reads it."""
        with self.path.open("rb") as stream:
            single = stream.read(2) == b"MZ"
        return ("sh", str(self.path)) if single and os.name != "nt" else (str(self.path),)


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what steers an engine (variables, configuration files, a model cache); then ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return kept | {"XDG_CONFIG_HOME": str(home), "LLAMA_CACHE": str(home / "cache"), "NO_COLOR": "1"} | dict(extra or {})


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """An engine serving on a free port of 127.0.0.1, as a context manager.

    ``model`` is None for a router, ``command`` is what makes the engine a server, ``extra`` are variables that it shall see. It ends with the block, and on Linux with this process however that ends. Enter it in the main thread: the kernel's promise
    to end a child holds for the thread that started it.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path | None,
        flags: Sequence[str] = (),
        *,
        command: Sequence[str] = ("serve",),
        extra: Mapping[str, str] | None = None,
        healthy_within: float = HEALTHY_WITHIN,
    ) -> None:
        self.engine = engine
        self.port = free_port()
        chosen = ("--model", str(model)) if model is not None else ()
        self.argv = [*engine.words, *command, "--host", "127.0.0.1", "--port", str(self.port), *chosen, *flags]
        self._extra = extra
        self._healthy_within = healthy_within
        self._home = tempfile.TemporaryDirectory(prefix="opencoti-gate-")
        self._log = Path(self._home.name) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment(Path(self._home.name), self._extra),
                    preexec_fn=_die_with_parent if _LIBC is not None else None,  # noqa: PLW1509 - see _LIBC
                )
            self._wait_until_healthy()
        except OSError as problem:
            self.stop()
            raise EngineError(f"Cannot start {self.engine.path}: {problem.strerror or problem}.") from problem
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """What the engine wrote so far."""
        return self._log.read_text("utf-8", errors="replace") if self._log.exists() else ""

    def stop(self) -> None:
        """End the engine, politely and then for good, and remove its folder."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(STOPS_WITHIN)
                except subprocess.TimeoutExpired:
                    self._process.kill()
            self._process.wait()
        self._home.cleanup()

    def post(self, path: str, body: Any, *, timeout: float = ANSWERS_WITHIN) -> Any:
        """The JSON answer to a JSON request. Raises EngineError when the answer is an error, is no JSON or does not come."""
        status, text = self._ask("POST", path, json.dumps(body), timeout)
        try:
            answer = json.loads(text)
        except ValueError as problem:
            raise self._failed(f"answered {path} with something that is not JSON: {text[:80]!r}") from problem
        if status != 200:
            error = answer.get("error") if isinstance(answer, dict) else None
            said = error.get("message") if isinstance(error, dict) else text[:200]
            raise self._failed(f"refused {path} with status {status}: {said}")
        return answer

    def _ask(self, method: str, path: str, body: str | None, timeout: float) -> tuple[int, str]:
        # http.client rather than requests: no proxy of the environment stands between this process and its own machine.
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body=body, headers={"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException) as problem:
            raise self._failed(f"did not answer {path}: {problem or type(problem).__name__}") from problem
        finally:
            connection.close()

    def _failed(self, what: str) -> EngineError:
        code = self._process.poll() if self._process is not None else None
        ended = f"; it ended with exit code {code}" if code is not None else ""
        return EngineError(f"{self.engine.name} {what.rstrip('.')}{ended}.", details=self.log[-_TAIL:])

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._healthy_within
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise self._failed("did not start")
            try:
                if self._ask("GET", "/health", None, 5.0)[0] == 200:
                    return
            except EngineError:
                pass  # not listening yet
            time.sleep(0.05)
        raise self._failed(f"was not ready within {self._healthy_within:.0f} s")


def run(engine: Engine, words: Sequence[str], home: Path, on_line: Callable[[str], None] = lambda line: None) -> str:
    """Run one of the engine's commands to its end and return its output, both streams joined; ``on_line`` gets every line as it comes.

    On Linux it ends with this process. Raises EngineError when it cannot be started or ends with an exit code other than 0.
    """
    try:
        process = subprocess.Popen(
            (*engine.words, *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment(home),
            preexec_fn=_die_with_parent if _LIBC is not None else None,  # noqa: PLW1509 - see _LIBC
        )
    except OSError as problem:
        raise EngineError(f"Cannot start {engine.path}: {problem.strerror or problem}.") from problem
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            on_line(line.rstrip("\n"))
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    output = "".join(lines)
    if code != 0:
        raise EngineError(f"{engine.name} {words[0]} ended with exit code {code}.", details=output[-_TAIL:])
    return output


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here and not in the child, where between fork and exec as little as possible may happen: other threads run in this process."""


def _die_with_parent() -> None:
    """Runs in the child: asks the kernel to end it when its parent is gone (prctl(2), PR_SET_PDEATHSIG = 1)."""
    if _LIBC is not None:
        _LIBC.prctl(1, int(signal.SIGKILL))
