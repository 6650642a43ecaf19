"""The gates' server as the tests want it: from a path, started in any way, and answers with their status."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opencoti_build.errors import EngineError
from opencoti_build.gates.serving import Engine, Server, environment


@dataclass(frozen=True)
class Reply:
    """One HTTP answer; an error status is an answer too."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON; ``ValueError`` if it is none."""
        return json.loads(self.text)


class ServerProcess(Server):
    """The engine with ``--server``, or with what ``mode`` says instead. ``model`` may be None (a router), ``env`` are variables for it."""

    def __init__(self, engine: Path, model: Path | None, *flags: str, env: Mapping[str, str] | None = None, mode: tuple[str, ...] = ("--server",)) -> None:
        super().__init__(Engine(engine.name, engine, ""), model, flags, command=mode, extra=env)

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def get(self, path: str) -> Reply:
        """The answer to a GET, whatever its status."""
        return Reply(*self._ask("GET", path, None, 60.0))

    def complete(self, prompt: str | list[int], n_predict: int = 16, **more: Any) -> dict[str, Any]:
        """A greedy completion."""
        return self.post("/completion", {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1} | more, timeout=300.0)

    def _failed(self, what: str) -> EngineError:
        error = super()._failed(what)
        error.add_note(error.details)  # so that pytest shows the end of the log
        return error


def serve(engine: Path, model: Path | None, *flags: str, env: Mapping[str, str] | None = None) -> ServerProcess:
    """``with serve(engine, model, "--parallel", "2") as server:``"""
    return ServerProcess(engine, model, *flags, env=env)


def run_engine(engine: Path, *arguments: str, home: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the engine to its end, whatever it ends with, its two streams apart; ``home`` is an empty directory."""
    return subprocess.run(
        [str(engine), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=environment(home, env),
        timeout=300,
        check=False,
    )
