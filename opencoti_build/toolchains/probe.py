"""Proves that a compiler is not broken before hours are spent with it: compiles a small program the way the engine is, and runs it.

The defect looked for was seen in a Cosmopolitan toolchain: the code put in for a thread-local access changes the processor's
flags, and the compiler may place the access between a comparison and the jump that depends on it. At -O2 wrong branches are taken then; nothing
else tells. So the probe makes comparisons whose branch touches thread-locals, and a function-local thread-local container, in many
shapes, and counts what comes out wrong.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from .. import files
from ..errors import ToolchainError
from ..runner import Runner

PASSED = "probe passed"
"""What the program prints when every branch was right."""


@dataclass(frozen=True)
class Probe:
    """How to compile and link in separate steps (a single step skips Cosmopolitan's thread-local pass), and how to run the result."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    run: tuple[str, ...] | None
    """Words in front of the program, () to start it as it is, None when it cannot run here."""


def check(probe: Probe, scratch: Path, runner: Runner, *, environment: Mapping[str, str], what: str) -> bool:
    """Compile, link and run the probe; False when it could be built but not be run here.

    Raises ToolchainError when a step fails or the program finds the compiler wrong.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    source, thing, program = scratch / "probe.cpp", scratch / "probe.o", scratch / "probe.out"
    files.write_text(source, resources.files("opencoti_build").joinpath("resources", "probe.cpp").read_text("utf-8"))
    runner.run((*probe.compile, "-std=c++17", "-O2", "-c", source, "-o", thing), env=environment, error=ToolchainError)
    runner.run((*probe.link, thing, "-o", program), env=environment, error=ToolchainError)
    if probe.run is None:
        return False
    outcome = runner.run((*probe.run, program), env=environment, check=False, error=ToolchainError)
    if outcome.code != 0 or PASSED not in outcome.output:
        raise ToolchainError(
            f"{what} miscompiles: a comparison, a thread-local access and a jump at -O2 gave the wrong branch, so the engine would be wrong too. "
            "Use another version of it, or the zig toolchain.",
            details=outcome.output,
        )
    return True


def runs_here(os_name: str, arch: str) -> bool:
    """Whether a native program of that platform can run on this machine."""
    system = {"linux": "linux", "win32": "windows", "darwin": "macos"}.get(sys.platform, "")
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    return system == os_name and machine == arch
