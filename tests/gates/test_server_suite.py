"""The plugin and the runner of the server suite, on a small suite shaped like upstream's, in a real pytest."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from opencoti_build.cache import Cache
from opencoti_build.cli.common import CommandContext
from opencoti_build.console import Console, Mode
from opencoti_build.errors import GateError
from opencoti_build.gates.server_suite import Outcome, Suite, TestResult
from opencoti_build.gates.suite_data import ServerData, Skip
from opencoti_build.gates.suite_protocol import matches
from opencoti_build.project import Project
from opencoti_build.runner import SystemRunner

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the engine is a shell script, time limits are signals")

CONFTEST = """
import pytest
from utils import *

@pytest.fixture(scope="session", autouse=True)
def load_server_presets():
    ServerPreset.load_all()
"""

UTILS = """
import os, subprocess
import requests, wget

class ServerProcess:
    server_port = 8080
    def __init__(self):
        pass
    def ask(self, *words):
        return subprocess.run([os.environ["LLAMA_SERVER_BIN_PATH"], *words], capture_output=True, text=True).stdout
    def make_request(self, method, path, data=None, headers=None):
        return data
    def make_stream_request(self, method, path, data=None):
        return data

class ServerPreset:
    @staticmethod
    def load_all():
        raise RuntimeError("this would download")
"""

TESTS = """
import os
import pytest, requests, wget
from pathlib import Path
from utils import *

def test_passes():
    assert ServerProcess().ask("--port", "a b") == f"serve --port a b\\n"

def test_port_is_free():
    assert ServerProcess().server_port not in (0, 8080)

def test_downloads():
    url = "https://huggingface.co/o/m/resolve/main/f.bin"
    assert requests.get(url).content == b"DATA"
    wget.download(url, out="./tmp/f.bin")
    assert Path("tmp/f.bin").read_bytes() == b"DATA"
    data = ServerProcess().make_request("POST", "/x", data={"l": [{"url": url}], "n": 1})
    assert data["n"] == 1 and data["l"][0]["url"].startswith("http://127.0.0.1:")

def test_surroundings():
    assert list(Path(os.environ["LLAMA_CACHE"]).glob("models--o--m/snapshots/*/f.bin"))
    assert not list(Path(os.environ["LLAMA_CACHE"]).glob("models--o--later*"))
    assert os.environ["MODEL_ENDPOINT"].startswith("http://127.0.0.1:")
    assert [name for name in os.environ if name.startswith(("OPENCOTI_", "LLAMA_ARG_"))] == ["LLAMA_ARG_THREADS"]

@pytest.mark.parametrize("word", ["alpha", "b[1]"])
def test_soft(word):
    assert word_known("alpha", word), "this is about the model"

def word_known(expected, word):
    return ServerProcess().ask(word) == f"serve {expected}\\n"

def helper(value):
    assert value == 2

def test_fails():
    helper(1)

def test_hangs():
    import time
    time.sleep(60)

@pytest.mark.slow
def test_large():
    pass

def test_left_out():
    pass

@pytest.mark.skip(reason="upstream's own")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise OSError("no such thing")

def test_setup_fails(broken):
    pass
"""

ENGINE = '#!/bin/sh\necho "$@"\n'


@pytest.fixture
def workshop(tmp_path: Path) -> CommandContext:
    return CommandContext(Project(tmp_path / "project"), Console(io.StringIO(), mode=Mode.QUIET), SystemRunner(), Cache(tmp_path / "cache"), offline=True, dry_run=False)


@pytest.fixture
def suite(tmp_path: Path, workshop: CommandContext, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Suite]:
    tests = tmp_path / "tree" / "tools" / "server" / "tests"
    (tests / "unit").mkdir(parents=True)
    for name, text in (("conftest.py", CONFTEST), ("utils.py", UTILS), ("unit/test_some.py", TESTS), ("pytest.ini", "[pytest]\nmarkers =\n    slow: long\n")):
        (tests / name).write_text(text)
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "7")
    monkeypatch.setenv("OPENCOTI_LLAMAFILE_CTX_SIZE", "7")
    file = tmp_path / "f.bin"
    file.write_bytes(b"DATA")

    def make(engine: str = ENGINE, name: str = "patched", workers: int = 1) -> Suite:
        program = tmp_path / f"engine of {name}'s"
        program.write_text(engine)
        program.chmod(0o755)
        data = ServerData(2, (r"word_known\(",), {}, ("o/later",), (Skip("test_left_out", "a reason"),))
        return Suite(workshop, data, tmp_path / "tree", "a" * 40, {"o/m": {"f.bin": file}, "o/later": {"f.bin": file}}, name, program, workers)

    return make


def named(results: dict[str, TestResult]) -> dict[str, TestResult]:
    return {name.partition("::")[2]: result for name, result in results.items()}


def test_every_kind_of_result(suite: Callable[..., Suite], tmp_path: Path) -> None:
    tree = {path: path.read_bytes() for path in (tmp_path / "tree").rglob("*") if path.is_file()}
    made = suite()
    ids = made.collect()
    assert len(ids) == 12 and "unit/test_some.py::test_soft[b[1]]" in ids
    results = named(made.run(ids))
    outcomes = {name: result.outcome for name, result in results.items()}
    passed = {"test_passes", "test_port_is_free", "test_downloads", "test_surroundings", "test_soft[alpha]", "test_soft[b[1]]"}
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.PASSED} == passed, results
    assert {name for name, outcome in outcomes.items() if outcome is Outcome.SKIPPED} == {"test_large", "test_left_out", "test_skipped"}
    assert results["test_left_out"].reason == "a reason" and results["test_skipped"].reason == "upstream's own" and "several GB" in results["test_large"].reason
    lines = TESTS.splitlines()
    failure = results["test_fails"]
    assert failure.where == f"test_some.py:{lines.index('    assert value == 2') + 1}" and failure.error == "AssertionError"
    assert results["test_hangs"].error == "TimeoutError" and results["test_setup_fails"].error == "OSError"
    soft = next(number for number, line in enumerate(lines, 1) if "this is about the model" in line)
    assert {path: path.read_bytes() for path in (tmp_path / "tree").rglob("*") if path.is_file()} == tree
    assert results["test_soft[alpha]"].soft == ((soft, True),) and results["test_soft[b[1]]"].soft == ((soft, False),)


def test_a_known_result_is_not_asked_for_again(suite: Callable[..., Suite], tmp_path: Path) -> None:
    engine = f"#!/bin/sh\necho x >>{tmp_path}/count\necho \"$@\"\n"
    name = "unit/test_some.py::test_passes"
    first = suite(engine).run([name])
    assert suite(engine).run([name]) == first
    assert (tmp_path / "count").read_text() == "x\n"
    suite(engine + "# another program\n").run([name])
    suite(engine).run([name], fresh=True)
    assert (tmp_path / "count").read_text() == "x\nx\nx\n"


def test_several_workers_give_the_same(suite: Callable[..., Suite]) -> None:
    ids = ["unit/test_some.py::test_passes", "unit/test_some.py::test_fails", "unit/test_some.py::test_soft[b[1]]", "unit/test_some.py::test_left_out", "unit/test_some.py::test_downloads"]
    alone = suite().run(ids, fresh=True)
    together = suite(workers=2).run(ids, fresh=True)
    assert {name: result.verdict for name, result in together.items()} == {name: result.verdict for name, result in alone.items()}


def test_a_suite_that_cannot_be_loaded_says_so(suite: Callable[..., Suite], tmp_path: Path) -> None:
    made = suite()
    (tmp_path / "tree" / "tools" / "server" / "tests" / "utils.py").write_text("import no_such_module\n")
    with pytest.raises(GateError, match="could not run") as caught:
        made.collect()
    assert "no_such_module" in caught.value.details


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("test_slot_save.py", True),
        ("test_slot*", True),
        ("test_save", True),
        ("test_save[a[1]-b]", True),
        ("unit/test_slot_save.py::test_save", True),
        ("test_slot_save.py::test_sa?e", True),
        ("test_sav", False),
        ("test_save[a1-b]", False),
        ("test_other.py::test_save", False),
    ],
)
def test_patterns(pattern: str, meant: bool) -> None:
    assert matches("unit/test_slot_save.py::test_save[a[1]-b]", pattern) is meant


def test_a_result_survives_json() -> None:
    result = TestResult("unit/a.py::b", Outcome.FAILED, "r", "a.py:3", "KeyError", ((3, True), (4, False)), 1.5)
    assert TestResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
