"""The engine says which engine it is, everywhere in the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from server_process import run_engine, serve

LINES = [
    r"opencoti-[A-Za-z0-9._+]+-[A-Za-z0-9._+]+",
    r"llama\.cpp b\d+ \(commit ([0-9a-f]+|unknown)\)",
    r"tree ([0-9a-f]{40}|unknown)",
    r"built with \S.* for \S.*",
]


@pytest.fixture(scope="module")
def version(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    result = run_engine(engine, "--version", home=tmp_path_factory.mktemp("home"))
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


def test_version_is_four_lines_on_standard_output(version: list[str]) -> None:
    assert len(version) == len(LINES)
    for line, pattern in zip(version, LINES, strict=True):
        assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize(
    "arguments",
    [("version",), ("-m", "no-such-file.gguf", "--version"), ("--server", "--version"), ("cli", "--version"), ("bench", "--version"), ("completion", "--version")],
    ids=" ".join,
)
def test_every_program_in_the_file_says_the_same(engine: Path, version: list[str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_engine(engine, *arguments, home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == version


def test_the_server_says_the_same_and_keeps_upstreams_build_info(engine: Path, model: Path, version: list[str]) -> None:
    with serve(engine, model, "--ctx-size", "256") as server:
        props = server.get("/props").json
    ours = props["opencoti"]
    assert [ours["version"], f"llama.cpp {ours['base']} (commit {ours['commit']})", f"tree {ours['tree']}"] == version[:3]
    assert re.fullmatch(r"b\d+-\S+", props["build_info"])
