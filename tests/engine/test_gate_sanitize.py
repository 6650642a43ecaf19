"""Sanitizers for real: what the compiler's own runtimes write is understood, and a defect planted in the engine is found and called ours.

The planted defects need an instrumented engine, many minutes of work when nothing is cached: they run with OPENCOTI_TEST_SANITIZERS=1.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from opencoti_build.cli.common import CommandContext
from opencoti_build.gates import sanitizer_data
from opencoti_build.gates.findings import Ours, Owner, collect
from opencoti_build.gates.sanitizer_data import Sanitizer
from opencoti_build.gates.sanitizers import SanitizerGate
from opencoti_build.project import find_project
from opencoti_build.runner import SystemRunner
from opencoti_build.toolchains.native import find_compilers

DATA = sanitizer_data.load(find_project().root / "gate" / "sanitizers.yaml")

MAIN = """
#include <climits>
#include <string>
#include <thread>
int helper(const char * text);
int overflow(int value) { return value + INT_MAX; }
static int shared;
int main(int argc, char ** argv) {
    const std::string mode = argv[1];
    if (mode == "freed") {
        const char * gone;
        { std::string text(100, 'x'); gone = text.c_str(); }
        return helper(gone);
    }
    if (mode == "overflow") { return overflow(argc) == 7; }
    if (mode == "leak") { return new int[argc] == nullptr; }
    std::thread other([] { shared++; });
    shared++;
    other.join();
    return 0;
}
"""

HELPER = "int helper(const char * text) { return text[3] == 'q'; }\n"


def build(folder: Path, sanitizer: Sanitizer) -> Path:
    """A program of two files, one of them ours, built as the gate builds the engine."""
    compilers = find_compilers(SystemRunner())
    if compilers is None:
        pytest.skip("no compiler on this machine")
    source = folder / "source"
    (source / "opencoti").mkdir(parents=True)
    (source / "main.cpp").write_text(MAIN)
    (source / "opencoti" / "helper.cpp").write_text(HELPER)
    words = [compilers.cxx, *sanitizer.optimise, *sanitizer.compile, *sanitizer.own, *sanitizer.link, f"-ffile-prefix-map={source}=.", "-o", folder / "program", source / "main.cpp", source / "opencoti" / "helper.cpp"]
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=folder)
    if "cannot find" in made.stderr:
        pytest.skip(f"the compiler has no {sanitizer.name} runtime: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    return folder / "program"


@pytest.mark.parametrize(
    ("name", "mode", "kind", "file", "owner"),
    [
        ("address", "freed", "AddressSanitizer: heap-use-after-free", "opencoti/helper.cpp", Owner.OURS),
        ("address", "overflow", "UndefinedBehaviorSanitizer: signed integer overflow: N + N cannot be represented in type 'int'", "main.cpp", Owner.UPSTREAM),
        ("address", "leak", "LeakSanitizer: leak", "main.cpp", Owner.UPSTREAM),
        ("thread", "race", "ThreadSanitizer: data race", "main.cpp", Owner.UPSTREAM),
    ],
)
def test_the_runtimes_reports_are_understood(tmp_path: Path, name: str, mode: str, kind: str, file: str, owner: Owner) -> None:
    sanitizer = DATA.sanitizers[name]
    program = build(tmp_path, sanitizer)
    reports = tmp_path / "reports"
    reports.mkdir()
    environment = {**os.environ, **{variable: f"{value}:log_path={reports}/{variable.lower()}" for variable, value in sanitizer.environment.items()}}
    subprocess.run([*sanitizer.prefix, str(program), mode], env=environment, capture_output=True)
    found = {finding.kind: finding for finding in collect(reports, str(tmp_path / "source"))}
    assert kind in found, [path.read_text() for path in reports.iterdir()]
    assert found[kind].places[0].file == file
    assert Ours({}).owner(found[kind]) is owner


@pytest.fixture(scope="module")
def gate(workshop: CommandContext) -> SanitizerGate:
    if os.environ.get("OPENCOTI_TEST_SANITIZERS", "") in ("", "0"):
        pytest.skip("builds an instrumented engine: set OPENCOTI_TEST_SANITIZERS=1")
    return SanitizerGate.load(workshop)


@pytest.mark.parametrize("plant", list(DATA.plants))
def test_a_planted_defect_is_found_and_named(gate: SanitizerGate, plant: str) -> None:
    wanted = DATA.plants[plant]
    judged = gate.judge(gate.run(wanted.sanitizer, plant=plant))
    ours = [item for item in judged if item.owner is Owner.OURS]
    assert any(item.finding.kind == wanted.kind and wanted.file in {frame.file for stack in item.finding.stacks for frame in stack} for item in ours), [item.place for item in judged]
