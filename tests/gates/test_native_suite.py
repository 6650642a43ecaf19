"""Upstream's C++ tests: which run, within which limits, and what is kept. Small scripts stand for the programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from opencoti_build.cache import Cache
from opencoti_build.console import Console, Mode
from opencoti_build.errors import BuildError
from opencoti_build.gates import native_suite
from opencoti_build.gates.native_suite import NativeResult, NativeTest, Outcome
from opencoti_build.gates.suite_data import ExtraTest, Limits, NativeData, Skip
from opencoti_build.gates.tree_build import RegisteredTest, registered_tests

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-ins are shell scripts")

LISTING = r"""# CMake generated Testfile for
add_test([=[test-a]=] "/w/bin/test-a")
set_tests_properties([=[test-a]=] PROPERTIES  LABELS "main" WORKING_DIRECTORY "." _BACKTRACE_TRIPLES "/t/CMakeLists.txt;58;add_test;/t/CMakeLists.txt;0;")
add_test([=[make-models]=] "/w/bin/test-archs" "-o" "/w/tests/test-models/")
set_tests_properties([=[make-models]=] PROPERTIES  FIXTURES_SETUP "models" LABELS "main" WORKING_DIRECTORY ".")
add_test("test-b" "/w/bin/test-b" "-m" "/w/tiny/stories.gguf" "-p" "say \"x\"")
set_tests_properties("test-b" PROPERTIES  ENVIRONMENT "A=1;B=2" FIXTURES_REQUIRED "models" LABELS "model" WORKING_DIRECTORY "/t")
subdirs("opencoti")
"""


def data(memory: int = 1024, **limits: Limits) -> NativeData:
    return NativeData(memory, {"*": Limits(256, 20), **limits}, (ExtraTest("extra", "test-x", ("-q",)),), {"stories.gguf": "story"}, "story", (Skip("skip-*", "why"),))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def program(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test(name: str, folder: Path, limits: Limits = Limits(256, 20), **more: Sequence[str]) -> NativeTest:
    return NativeTest(name, name, (), (), folder, {}, limits, tuple(more.get("provides", ())), tuple(more.get("needs", ())))


test.__test__ = False  # type: ignore[attr-defined]


@pytest.fixture
def execute(tmp_path: Path, cache: Cache) -> Callable[..., dict[str, NativeResult]]:
    def run(*tests: NativeTest, memory: int = 1024) -> dict[str, NativeResult]:
        return native_suite.run(
            tests,
            tree_id="a" * 40,
            programs=tmp_path / "bin",
            data=data(memory),
            cache=cache,
            console=Console(io.StringIO(), mode=Mode.QUIET),
            logs=tmp_path / "logs",
            jobs=2,
        )

    return run


def test_what_the_tree_registers(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "CTestTestfile.cmake").write_text(LISTING)
    a, models, b = registered_tests(tmp_path)
    assert (a.name, a.command, a.label, a.target, a.folder) == ("test-a", ("/w/bin/test-a",), "main", "test-a", tmp_path / "tests")
    assert (models.target, models.command[1:], models.provides) == ("test-archs", ("-o", "/w/tests/test-models/"), ("models",))
    assert (b.command[1:], b.environment, b.needs, b.folder) == (("-m", "/w/tiny/stories.gguf", "-p", 'say "x"'), ("A=1", "B=2"), ("models",), Path("/t"))


def test_a_tree_without_tests_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="LLAMA_BUILD_TESTS"):
        registered_tests(tmp_path)


def test_the_plan_skips_replaces_and_adds(tmp_path: Path) -> None:
    registered = [RegisteredTest("skip-me", ("/w/bin/s",)), RegisteredTest("b", ("/w/bin/b", "-m", "/w/tiny/stories.gguf", "/w/tests/out"), environment=("A=1",))]
    planned = native_suite.plan(data(b=Limits(512, 7)), registered, work=Path("/w/build"), models={"story": tmp_path / "story.gguf"}, digests={"story": "ff"})
    assert [item.name for item in planned] == ["b", "extra"]
    assert planned[0].arguments == ("-m", str(tmp_path / "story.gguf"), "/w/tests/out")
    assert planned[0].limits == Limits(512, 7) and planned[1].limits == Limits(256, 20)
    assert planned[0].environment["A"] == "1" and planned[0].environment["LLAMACPP_TEST_MODELFILE"] == str(tmp_path / "story.gguf")
    assert "ff" in planned[0].inputs and not any("/w" in word or str(tmp_path) in word for word in planned[0].inputs)


def test_passing_failing_and_hanging(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]]) -> None:
    program(tmp_path / "bin", "good", "exit 0")
    program(tmp_path / "bin", "bad", "echo about to fail; exit 3")
    program(tmp_path / "bin", "hung", "sleep 100 & wait")
    results = execute(test("good", tmp_path), test("bad", tmp_path), test("hung", tmp_path, Limits(256, 1)))
    assert {name: result.outcome for name, result in results.items()} == {"good": Outcome.PASSED, "bad": Outcome.FAILED, "hung": Outcome.TIMED_OUT}
    assert (results["bad"].code, results["bad"].output) == (3, "about to fail")


def test_the_address_space_is_limited(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]]) -> None:
    (tmp_path / "bin").mkdir()
    code = f"import sys; bytearray({16 * native_suite.ADDRESS_SPACE} << 24)"
    program(tmp_path / "bin", "greedy", f"exec {sys.executable} -c '{code}'")
    assert execute(test("greedy", tmp_path, Limits(64, 20)))["greedy"].outcome is Outcome.FAILED


def test_a_known_result_is_not_asked_for_again(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]]) -> None:
    body = f"echo x >>{tmp_path}/count; exit 1"
    program(tmp_path / "bin", "a", body)
    for _ in range(2):
        assert execute(test("a", tmp_path))["a"].outcome is Outcome.FAILED
    assert (tmp_path / "count").read_text() == "x\n"
    program(tmp_path / "bin", "a", body + " # another program")
    execute(test("a", tmp_path))
    execute(test("a", tmp_path, Limits(256, 21)))
    assert (tmp_path / "count").read_text() == "x\nx\nx\n"


def test_a_damaged_result_counts_as_none(tmp_path: Path, cache: Cache, execute: Callable[..., dict[str, NativeResult]]) -> None:
    program(tmp_path / "bin", "a", "exit 0")
    execute(test("a", tmp_path))
    (stored,) = cache.root.glob("results/*/*/result.json")
    for text in ("", "{}", json.dumps({"name": "a", "outcome": "perhaps", "code": 0, "seconds": 0, "output": ""})):
        stored.write_text(text)
        assert execute(test("a", tmp_path))["a"].outcome is Outcome.PASSED


def test_what_makes_files_for_others_runs_before_them(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]]) -> None:
    program(tmp_path / "bin", "maker", f"echo made >{tmp_path}/file")
    program(tmp_path / "bin", "user", f"cat {tmp_path}/file")
    tests = (test("user", tmp_path, needs=("f",)), test("maker", tmp_path, provides=("f",)))
    assert {result.outcome for result in execute(*tests).values()} == {Outcome.PASSED}
    (tmp_path / "file").unlink()
    program(tmp_path / "bin", "user", f"cat {tmp_path}/file # changed")
    assert {result.outcome for result in execute(*tests).values()} == {Outcome.PASSED}


def test_memory_is_shared_out(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]]) -> None:
    """Two tests that each need more than half never overlap: each would see the other's mark."""
    for name in ("a", "b"):
        program(tmp_path / "bin", name, f"[ -e {tmp_path}/mark ] && exit 1; touch {tmp_path}/mark; sleep 0.2; rm {tmp_path}/mark")
    results = execute(test("a", tmp_path, Limits(600, 20)), test("b", tmp_path, Limits(5000, 20)), memory=1024)
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}


def test_variables_that_steer_an_engine_do_not_get_in(tmp_path: Path, execute: Callable[..., dict[str, NativeResult]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    monkeypatch.setenv("OPENCOTI_LLAMAFILE_CTX_SIZE", "1")
    program(tmp_path / "bin", "a", "env | grep -E '^(LLAMA|OPENCOTI)_' && exit 1; exit 0")
    assert execute(test("a", tmp_path))["a"].outcome is Outcome.PASSED
