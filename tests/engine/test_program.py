"""One executable, several programs: what each command line starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from server_process import ServerProcess, run_engine, serve


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)], ids=lambda a: " ".join(a) or "nothing")
def test_an_overview_tells_how_to_chat_to_serve_and_to_get_help(engine: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run_engine(engine, *arguments, home=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.match(r"opencoti-\S+ \(llama\.cpp b\d+\)\n", result.stdout)
    name = engine.name
    for line in (f"{name} -m MODEL", f"{name} --server -m MODEL", f"{name} cli --help", f"{name} --server --help"):
        assert line in result.stdout
    assert len(result.stdout.splitlines()) < 40


@pytest.mark.parametrize(
    ("arguments", "only_there"),
    [
        (("--server", "--help"), "--slot-save-path"),
        (("--help", "--server"), "--slot-save-path"),
        (("serve", "--help"), "--slot-save-path"),
        (("cli", "--help"), "--server-base"),
        (("-m", "x.gguf", "--help"), "--server-base"),
        (("bench", "--help"), "--n-depth"),
        (("perplexity", "--help"), "--hellaswag"),
        (("completion", "--help"), "--no-display-prompt"),
        (("quantize", "--help"), "--allow-requantize"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, tuple) else "",
)
def test_the_help_of_each_program(engine: Path, tmp_path: Path, arguments: tuple[str, ...], only_there: str) -> None:
    result = run_engine(engine, *arguments, home=tmp_path)
    assert only_there in result.stdout + result.stderr


def test_all_commands_are_listed_on_request(engine: Path, tmp_path: Path) -> None:
    listed = run_engine(engine, "help", "all", home=tmp_path).stdout
    for command in ("serve", "cli", "bench", "perplexity", "quantize", "completion", "batched-bench", "fit-params", "licenses"):
        assert re.search(rf"^  {command} ", listed, re.M), command


@pytest.mark.parametrize("word", ["licenses", "--licenses", "credits"])
def test_licences_are_in_the_file(engine: Path, tmp_path: Path, word: str) -> None:
    result = run_engine(engine, word, home=tmp_path)
    assert result.returncode == 0
    assert "License for llama.cpp" in result.stdout and "MIT License" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bnech",), "did you mean 'bench'"),
        (("quantise", "a", "b"), "did you mean 'quantize'"),
        (("xyzzy",), "help all"),
        (("model.gguf",), "-m"),
        (("cli", "--server"), "leave out one of them"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, tuple) else "",
)
def test_a_word_that_means_nothing_is_one_sentence_and_exit_code_2(engine: Path, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    result = run_engine(engine, *arguments, home=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) == 1 and says in result.stderr


@pytest.mark.parametrize("mode", [("--server",), ("serve",), ("server", "--server")], ids=" ".join)
def test_each_way_to_start_the_server(engine: Path, model: Path, mode: tuple[str, ...]) -> None:
    with ServerProcess(engine, model, "--ctx-size", "256", mode=mode) as server:
        assert server.get("/props").json["model_path"] == str(model)


def test_the_flag_may_come_last(engine: Path, model: Path) -> None:
    with ServerProcess(engine, model, "--ctx-size", "256", "--server", mode=()) as server:
        assert server.get("/health").json["status"] == "ok"


def test_the_flag_as_the_value_of_an_option_stays_a_value(engine: Path, model: Path) -> None:
    with serve(engine, model, "--ctx-size", "256", "--alias", "--server") as server:
        assert server.get("/props").json["model_alias"] == "--server"


def test_no_flag_chats(engine: Path, model: Path, tmp_path: Path) -> None:
    chat = ("-m", str(model), "-c", "256", "-n", "4", "--temp", "0", "--single-turn", "--simple-io", "-p")
    result = run_engine(engine, *chat, "--server", home=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "--server" in result.stdout  # the prompt it was asked to answer, echoed


def usage_name(engine: Path, home: Path, env: dict[str, str]) -> str:
    """The name the engine calls itself by."""
    found = re.search(r"^  (.+) -m MODEL", run_engine(engine, "--help", home=home, env=env).stdout, re.M)
    assert found
    return found[1]


def test_the_file_it_came_from_names_it(engine: Path, tmp_path: Path) -> None:
    universal = tmp_path / "näme of the file.llamafile"
    universal.write_bytes(b"")
    link = tmp_path / "link"
    link.symlink_to(engine)
    for program in (engine, link):
        assert usage_name(engine, tmp_path, {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": str(program)}) == universal.name


def test_a_file_of_another_program_does_not_name_it(engine: Path, tmp_path: Path) -> None:
    universal = tmp_path / "other.llamafile"
    universal.write_bytes(b"")
    copy = tmp_path / "copy"
    shutil.copy(engine, copy)
    own = str(engine)
    for env in (
        {"OPENCOTI_SELF": str(universal)},
        {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": ""},
        {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": str(tmp_path / "gone")},
        {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": sys.executable},
        {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": str(copy)},  # same bytes, another file
        {"OPENCOTI_SELF": str(tmp_path / "gone"), "OPENCOTI_SELF_EXE": own},
        {"OPENCOTI_SELF": str(tmp_path), "OPENCOTI_SELF_EXE": own},  # a directory
        {"OPENCOTI_SELF": "other.llamafile", "OPENCOTI_SELF_EXE": own},  # relative
    ):
        assert usage_name(engine, tmp_path, env) == engine.name, env


def children(pid: int) -> list[list[str]]:
    """Command lines of the direct children of a process (proc(5))."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append((stat.parent / "cmdline").read_text().split("\0")[:-1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_router_starts_its_children_from_the_same_program(engine: Path, model: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "tiny.gguf").symlink_to(model)
    universal = tmp_path / "file.llamafile"
    universal.write_bytes(b"")
    env = {"OPENCOTI_SELF": str(universal), "OPENCOTI_SELF_EXE": str(engine)}
    with ServerProcess(engine, None, "--models-dir", str(models), "--ctx-size", "256", env=env) as router:
        assert [entry["id"] for entry in router.get("/models").json["data"]] == ["tiny"]
        assert router.get("/props").json["opencoti"]["version"].startswith("opencoti-")
        answer = router.complete("The capital of France is", 4, model="tiny")
        assert answer["content"].strip()
        started = [argv for argv in children(router.pid) if "--port" in argv]
        assert len(started) == 1, json.dumps(started)
        assert Path(started[0][0]).resolve() == engine.resolve()
        assert started[0][1] == "serve" and "--server" not in started[0]
